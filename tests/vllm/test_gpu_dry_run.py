"""Run 5 of the check of a GPU, without one: vLLM on the CPU, and its graphs on the fake driver."""

from __future__ import annotations

import importlib.util
import json
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu import run

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_a_dry_run_goes_through_all_parts_of_run_5(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--dry-run", "--without-probe", "--run", "5", "--out", str(out), "--work", str(tmp_path / "work")]
    assert run.main(arguments) == 0
    results = json.loads((out / "results.json").read_text())
    assert list(results) == [
        "vllm",
        *(f"tiny-qwen3 vllm {part}" for part in ("captured", "bundle", "restored", "stock")),
    ]
    ours, stock = results["tiny-qwen3 vllm captured"], results["tiny-qwen3 vllm stock"]
    assert list(ours["batches"]) == ["1", "2", "4", "8"]
    assert ours["batches"] == stock["batches"]
    assert len({digest for batch in ours["batches"].values() for digest in batch["decode"]}) == 12
    assert {len(tokens) for tokens in ours["example"]} == {16}
    assert {"device", "load", "apply", "kv_cache"} <= set(ours["stages"])
    assert results["tiny-qwen3 vllm bundle"]["kept"] == {"full": 3, "piecewise": 4}
    assert results["tiny-qwen3 vllm restored"]["same"]
    summary = (out / "summary.txt").read_text()
    assert "ok    tiny-qwen3: vLLM: 4 sizes, vLLM's own worker: sizes that differ: none" in summary
    assert "ok    tiny-qwen3: vLLM: graphs kept: 3 full and 4 piecewise; refused: none" in summary
    assert "----  tiny-qwen3: vLLM: restoring against its own capture: not measured" in summary
    with tarfile.open(out / "run-5.tar.gz") as tar:
        assert {"results.json", "summary.txt", "tiny-qwen3.vllm.graphs", "vllm.log"} <= set(tar.getnames())
