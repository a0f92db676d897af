"""Offline work that lets an engine serve: its result, and what ends it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from answering_engine import AnsweringEngine
from medusa_runtime.config import Settings
from medusa_runtime.engine.base import SamplingParams
from medusa_runtime.errors import DeviceError, EngineError
from medusa_vllm.offline import complete, serve_beside

PARAMS = SamplingParams(max_tokens=2)


def test_the_engine_serves_until_the_work_is_done() -> None:
    engine: Any = AnsweringEngine()
    assert serve_beside(engine, lambda: complete(engine, [[1], [2, 3]], PARAMS, "r") or "done") == "done"
    assert engine.asked == [(1,), (2, 3)]


def test_a_request_that_is_not_completed_ends_the_work() -> None:
    engine: Any = AnsweringEngine(reason="error")
    with pytest.raises(EngineError, match="a prompt of 2 tokens ended with error, expected a completion"):
        serve_beside(engine, lambda: complete(engine, [[1, 2]], PARAMS, "r"))


def test_an_engine_that_cannot_load_is_asked_nothing() -> None:
    def load() -> None:
        raise DeviceError("no GPU")

    engine: Any = AnsweringEngine(load)
    with pytest.raises(DeviceError, match="no GPU"):
        serve_beside(engine, lambda: pytest.fail("it was asked"))
    assert engine.asked == []


@pytest.mark.timeout(20)
def test_work_that_would_end_the_process_ends_the_engine() -> None:
    def end() -> None:
        raise SystemExit(3)

    engine: Any = AnsweringEngine()
    with pytest.raises(SystemExit):
        serve_beside(engine, end)


@pytest.mark.timeout(20)
def test_an_engine_that_breaks_does_not_wait_for_the_work() -> None:
    never, under_way = threading.Event(), threading.Event()

    class Breaking(AnsweringEngine):
        def run(self, stop: threading.Event) -> None:
            self._loaded.set()
            assert under_way.wait(10)
            raise EngineError("the engine failed")

    engine: Any = Breaking()
    with pytest.raises(EngineError, match="the engine failed"):
        serve_beside(engine, lambda: under_way.set() or never.wait())
    never.set()


_PROFILE = """
import threading
from medusa_vllm.cpu.kv_profile import main

main()
print([thread.name for thread in threading.enumerate()])
"""


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_nothing_but_the_forward_runs_while_its_memory_is_measured(tmp_path: Path) -> None:
    """An idle engine would mount vLLM's own server, which takes tens of MB, and has sockets in the temporary folder."""
    example = str(Path(__file__).parents[2] / "examples" / "pydoc-lm")
    settings = json.dumps(asdict(Settings(engine="vllm", device="cpu", model=example)))
    command = [sys.executable, "-c", _PROFILE, example, str(tmp_path / "plan")]
    done = subprocess.run(command, input=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['MainThread']"
    assert json.loads((tmp_path / "plan").read_bytes())["activation_bytes"] < 20 << 20
