"""Two worker processes that share a model and one GPU write what one engine writes, also while they become one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import run
from benchmarks.gpu.run import Check, group_part, make_checkpoint
from benchmarks.gpu.summary import lines


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "where", [pytest.param("host", marks=pytest.mark.slow), pytest.param("gpu", marks=pytest.mark.gpu)]
)
def test_the_tokens_are_those_of_one_engine(where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    if where == "host":
        options = ["--dry-run", "--run", "6", "--out", str(out), "--work", str(work)]
        assert run.main(options) == 0
    else:
        request.getfixturevalue("cuda")
        out.mkdir()
        model = make_checkpoint(work, "tiny-llama", 100)
        Check(out, work, dry_run=False, budget_s=150).run(group_part("tiny-llama", model, pair=True))
    results = json.loads((out / "results.json").read_text())
    found = results["tiny-llama groups"]
    assert found["wrong_answers"] == 0, found
    assert found["gather"]["bytes"] > 0
    assert found["pair"] == {"wrong_answers": 0, "layers_helped": 2 * 2}  # two layers of two prompts
    assert "alone" not in found["group"], "it fell back"
    assert bool(found["device"]) == (where == "gpu")
    gap = found["group"]["longest_gaps"][0]
    assert gap["ms"] >= max(found["group"]["group_gap_ms"], found["group"]["instance_gap_ms"])
    said = lines(results)
    assert any(f"the longest gap in the group: {gap['ms']:.1f} ms before token {gap['token']}" in line for line in said)
    assert "ok    tiny-llama: two workers of a group: answers that are not one engine's: 0" in said
    assert "----  a group of workers on one GPU: not measured" not in said
