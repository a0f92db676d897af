"""The benchmark of groups: its options, what it makes of samples, and a small run where that is possible."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any

import pytest
from medusa_runtime.errors import ConfigError, EngineError

from benchmarks.pipeline.__main__ import ROWS, main
from benchmarks.pipeline.consolidation import _differences, gaps_together
from benchmarks.pipeline.disaggregation import burst
from benchmarks.pipeline.workers import Stream, Workers

EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc-lm"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rows", "speed"), "expected names of cold, prediction, transition"),
        (("--runs", "0"), "--runs of 1"),
        (("--largest", "0"), "--largest of 1 worker at least, found 0"),
        (("--model", "/nowhere"), "no config.json"),
    ],
)
def test_bad_calls_are_refused(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        main(["--model", str(EXAMPLE), *arguments])


def test_lost_changed_and_doubled_tokens_are_counted() -> None:
    assert _differences([1, 2, 3], [1, 2, 3]) == 0
    assert _differences([1, 9, 3], [1, 2, 3]) == 1
    assert _differences([1, 2], [1, 2, 3]) == 1
    assert _differences([1, 2, 2, 3], [1, 2, 3]) == 2


def test_tokens_are_compared_at_the_same_places_while_both_streams_run() -> None:
    found = Stream(100.0, list(range(10)), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    beside = Stream(104.5, list(range(6)), [1.0, 2.1, 3.2, 4.3, 5.4, 6.5])  # the last six, from 105.5 to 111
    ours, others = gaps_together(found, beside)
    assert ours == [1.0, 1.0, 1.0]  # from the sixth token, the first at 105.5 or later, to the ninth, at 109.9 there
    assert others == pytest.approx([1.1, 1.1, 1.1])
    assert gaps_together(found, Stream(120.0)) == ([], [])


@pytest.mark.parametrize("system", ["blitzscale", "s-llm"])
def test_decode_instances_in_step_with_prefill_instances_make_first_tokens_earlier(system: str) -> None:
    pytest.importorskip("simpy")
    without, tokens_without = burst(system, 0, prescale=False)
    with_, tokens_with = burst(system, 0, prescale=True)
    assert with_ < 0.9 * without
    assert tokens_with < 1.01 * tokens_without


@pytest.mark.cluster
@pytest.mark.root
@pytest.mark.slow
def test_a_group_in_a_laboratory_gives_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    arguments = ["--model", str(EXAMPLE), "--rows", "transition,consolidation", "--runs", "1", "--tokens", "16"]
    assert main([*arguments, "--prompt-tokens", "64", "--link", "10MB", "--json", str(file)]) == 0
    rows = {row["name"]: row["median"] for row in json.loads(file.read_text())["rows"]}
    assert rows["transition"] == 0
    assert set(rows) <= set(ROWS)


@pytest.mark.vllm
@pytest.mark.cluster
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_groups_of_vllm_workers_are_measured_from_cold(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    arguments = ["--model", str(EXAMPLE), "--rows", "cold", "--engine", "vllm", "--largest", "2", "--runs", "1"]
    assert main([*arguments, "--link", "400KB", "--json", str(file)]) == 0
    rows = {(row["name"], row["metric"]): row["median"] for row in json.loads(file.read_text())["rows"]}
    speedup = rows["cold-1", "ttft_s"] / rows["cold-2", "ttft_s"]
    assert rows["cold", "speedup_2"] == pytest.approx(speedup)


def test_workers_that_do_not_start_leave_nothing_behind() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def popen(_: str, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sh", "-c", "echo cold; exec sleep 60"], **options))
        return started[-1]

    site: Any = SimpleNamespace(
        options=SimpleNamespace(engine="torch", warm=True, batch_tokens=64),
        laboratory=SimpleNamespace(nodes=["n1", "n2"], popen=popen),
        url="http://origin/model",
    )
    before = set(Path(gettempdir()).glob("medusa-workers-*"))
    with pytest.raises(EngineError, match="worker 0 did not start"):
        Workers(site, [None, None], [None, None])
    assert [process.poll() is not None for process in started] == [True, True]
    assert set(Path(gettempdir()).glob("medusa-workers-*")) == before
