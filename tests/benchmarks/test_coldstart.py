"""Cold starts in turn with others: the contestants, what is compared, and what ends a run."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from medusa_adapters.bench.coldstart.contestants import Question
from medusa_runtime.errors import ConfigError, MedusaError

from benchmarks.coldstart.others import Script
from benchmarks.coldstart.rows import ROWS
from benchmarks.command_line import names
from benchmarks.make_checkpoint import main as make

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pydoc-lm"
QUESTION = Question(model="m", folder="m", prompt="p", max_tokens=1)


def bench(*arguments: str | Path, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.coldstart", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.slow
def test_ours_and_transformers_agree(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    files = ("--json", tmp_path / "rows.json", "--report", report)
    result = bench("--model", EXAMPLE, "--runs", "1", "--vs", "transformers", *files)
    assert result.returncode == 0, result.stderr
    names = {row["name"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert names == {"torch", "transformers", "torch-import", "floor"}
    assert "transformers takes" in result.stdout
    assert "work without an answer" in report.read_text()


@pytest.mark.slow
def test_mxfp4_beside_the_floats_of_transformers(tmp_path: Path) -> None:
    make(["--shape", "tiny-gpt-oss", "--out", str(tmp_path / "model")])
    common = ("--model", tmp_path / "model", "--vs", "transformers", "--prompt", "The", "--runs", "1")
    result = bench(*common, "--no-yardsticks", "--json", tmp_path / "rows.json")
    assert result.returncode == 0, result.stderr
    rows = {(row["name"], row["metric"]) for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert rows >= {(name, metric) for name in ("torch", "transformers") for metric in ("ttft_s", "pss_mb")}


@pytest.mark.slow
def test_steady_state(tmp_path: Path) -> None:
    common = ("--model", EXAMPLE, "--runs", "1", "--vs", "transformers")
    steady = bench(*common, "--steady", "--steady-tokens", "8", "--json", tmp_path / "steady.json")
    assert steady.returncode == 0, steady.stderr
    rows = {(row["name"], row["metric"]) for row in json.loads((tmp_path / "steady.json").read_text())["rows"]}
    assert rows == {(n, f"tokens_per_s_b{b}") for n in ("torch", "transformers") for b in (1, 8)}


@pytest.mark.slow
def test_turns_of_a_chat(tmp_path: Path) -> None:
    common = ("--model", EXAMPLE, "--runs", "1", "--rows", "torch", "--prompt", "nothing happened")
    turns = bench(*common, "--turns", "2", "--json", tmp_path / "turns.json")
    assert turns.returncode == 0, turns.stderr
    rows = {(row["name"], row["metric"]) for row in json.loads((tmp_path / "turns.json").read_text())["rows"]}
    assert rows == {("torch", "first_turn_ttft_s"), ("torch", "next_turn_ttft_s")}
    assert "expected 2 or more" in bench(*common, "--turns", "1").stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--vs", "tgi"), "expected names of transformers"),
        (("--rows", "torch,tgi"), "vllm-best-baseline"),
        (("--origin", "ftp"), "local, http, s3"),
        (("--rows", "vllm-cold", "--vllm-python", "/nowhere/python"), "/nowhere/python has no vllm"),
        (("--engine", "vllm", "--vllm-python", "/nowhere/python"), "/nowhere/python has no vllm"),
    ],
)
def test_bad_calls_are_refused(arguments: tuple[str, ...], said: str) -> None:
    result = bench("--model", EXAMPLE, *arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_contestant_that_fails_is_quoted() -> None:
    script = Script("broken", lambda _: ["-c", "import sys; sys.exit('no such model')"])
    with pytest.raises(MedusaError, match="no such model"):
        script.sample(QUESTION)


def test_a_sample_is_timed_from_exec_to_the_first_line() -> None:
    script = Script("sleeper", lambda _: ["-c", "import time; time.sleep(0.3); print(1, flush=True); time.sleep(60)"])
    assert script.sample(QUESTION).ttft_s > 0.3


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="snapshots are for x86-64 and aarch64")
def test_a_node_agent_is_timed_until_its_engine_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """And must use the snapshot where the row says so."""
    contestants = [ROWS[name](sys.executable) for name in ("torch-node", "torch-node-snapshot")]
    try:
        plain, resumed = (contestant.sample(QUESTION) for contestant in contestants)
        assert min(plain.ttft_s, resumed.ttft_s) > 0
        assert plain.pss_mb
        assert resumed.pss_mb
        assert resumed.pss_mb < plain.pss_mb
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the snapshot was made without
        with pytest.raises(MedusaError, match="did not use the snapshot"):
            contestants[1].sample(QUESTION)
    finally:
        for contestant in contestants:
            contestant.close()


def test_lists_are_checked() -> None:
    assert names("--vs", "a,b", ("a", "b")) == ("a", "b")
    assert names("--vs", "", ("transformers",)) == ()
    with pytest.raises(ConfigError, match="found x"):
        names("--vs", "x", ("transformers",))
