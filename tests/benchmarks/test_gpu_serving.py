"""Run 7 of the check of a GPU: a dry run of it, and what its lines say."""

from __future__ import annotations

import ctypes
import http.client
import json
import signal
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.device.driver import Driver

from benchmarks.gpu import run, serving, summary


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_dry_run_goes_through_all_parts_of_run_7(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run.main(["--dry-run", "--run", "7", "--out", str(out), "--work", str(tmp_path / "work")]) == 0
    results = json.loads((out / "results.json").read_text())
    assert list(results) == [f"tiny-qwen3 {part} torch" for part in ("served", "resumed", "full", "released")]
    served = results["tiny-qwen3 served torch"]
    assert 0 < served["first_token_s"] <= served["first_answer_s"]
    assert "restore" in {name for _, name, _ in served["stages"]}
    assert not served["continued"]
    assert [one["continued"] for one in results["tiny-qwen3 resumed torch"]["starts"]] == [True, True]
    assert results["tiny-qwen3 released torch"]["killed"] == 1
    lines = (out / "summary.txt").read_text().splitlines()
    assert sum(line.startswith("ok    tiny-qwen3: ") for line in lines) == 4
    assert not any(row in line for line in lines if line.startswith("----") for row in ("nearly full", "a crash"))
    with tarfile.open(out / "run-7.tar.gz") as tar:
        log = tar.extractfile("tiny-qwen3-released-torch.log")
        assert log is not None
        assert b"the engine process was killed by SIGKILL" in log.read()


def test_the_flags_are_those_of_the_command_line() -> None:
    settings = Settings(model="m", engine="vllm", kv_cache_mb=4, vllm_args="--a 0.4 --b c", max_waiting=9)
    assert serving.flags(settings) == ["--engine=vllm", "--kv-cache-mb=4", "--vllm-args=--a 0.4 --b c"]


def instance(answer: Any, exit_status: int | None, output: str) -> Any:
    def exchange(*_: Any, **__: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(status=answer, text="some text")

    process = SimpleNamespace(wait=lambda timeout_s: exit_status)
    return SimpleNamespace(exchange=exchange, process=process, output=lambda: output)


@pytest.mark.parametrize(
    ("answer", "exit_status", "output", "clear"),
    [
        (200, None, "fine", True),
        (http.client.RemoteDisconnected("gone"), 1, "ERROR: 2 GB are needed, 1 GB is free", True),
        (503, 1, "ERROR: 2 GB are needed, 1 GB is free", True),
        (ConnectionResetError("reset"), 1, "Traceback (most recent call last):", False),
        (ConnectionResetError("reset"), -signal.SIGSEGV, "", False),
        (TimeoutError(), 0, "nothing", False),
    ],
)
def test_only_an_answer_or_a_clear_end_is_as_it_should_be(
    answer: Any, exit_status: int | None, output: str, clear: bool
) -> None:
    found = serving.outcome(instance(answer, exit_status, output))
    assert found["clear"] is clear
    full = {"starts": {"256": found}}
    (line,) = summary._serving({"m full torch": full})
    assert line.startswith("ok" if clear else "MISS")
    assert ("an answer" in line) is (answer == 200)
    released = {"killed": 1, "after_s": 1.0, "after": found}
    assert [line[:4] for line in summary._serving({"m released torch": released})] == ["ok  " if clear else "MISS"]
    assert summary._serving({"m released torch": {**released, "killed": 0}})[0].startswith("MISS")


def test_a_start_from_a_snapshot_has_to_continue_and_to_say_the_same() -> None:
    def line(text: str, continued: bool) -> str:
        starts = [{"text": text, "continued": continued, "first_answer_s": 0.5}] * 2
        served = {"text": "a", "first_answer_s": 1.0, "later_answer_s": 0.1, "same_text": True}
        resumed = {"saved_bytes": 3e8, "starts": starts}
        return summary._serving({"m resumed torch": resumed, "m served torch": served})[0]

    assert line("a", True) == "ok    m: medusa serve, torch, from a snapshot of 300 MB: 0.50 and 0.50 s"
    assert line("b", True).startswith("MISS")
    assert line("a", False).startswith("MISS")


def test_a_gpu_is_filled_for_as_long_as_a_start_takes(fake_cuda: Path) -> None:
    driver = Driver(str(fake_cuda))

    def free() -> int:
        found, total = ctypes.c_size_t(), ctypes.c_size_t()
        driver.call("cuMemGetInfo_v2", ctypes.byref(found), ctypes.byref(total))
        return found.value

    with serving.filled_gpu(driver, 5 << 20):
        left = free()
    assert left == 5 << 20
    assert free() > left


def test_vllm_serves_what_run_5_has_materialized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "has_vllm", lambda: True)
    check = run.Check(tmp_path / "out", tmp_path / "work", dry_run=True, budget_s=300)
    monkeypatch.setattr(check, "checkpoint", lambda shape: tmp_path / shape)
    ((lane,),) = run.steps(7, check, ["m"])
    parts = {part.key: part for part in lane}
    served = ["m served torch", "m resumed torch", "m served vllm"]
    assert list(parts) == [*served, "m full torch", "m full vllm", "m released torch"]
    eager = next(run.vllm_parts("m", tmp_path / "m", "vllm", "never"))
    assert parts["m served vllm"].arguments[-1] == eager.arguments[3]
