"""Engines that serve offline, for what is measured or kept of it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.engine.base import Delta, SamplingParams
from medusa_runtime.errors import EngineError
from medusa_vllm.offline import complete, serve_beside

EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc-lm"


class Engine:
    """An engine that answers each request at once, with these reasons for its end."""

    mounts_when_idle = True

    def __init__(self, *reasons: str, error: Exception | None = None) -> None:
        self._reasons, self._error = list(reasons), error
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def wait_ready(self) -> None: ...

    def run(self, stop: threading.Event) -> None:
        if self._error is not None:
            raise self._error
        assert stop.wait(10)

    def add(self, request: Any, sink: Any) -> None:
        self.asked.append((request.id, request.prompt))
        sink(Delta(request.id, "a", (1,)))
        sink(Delta(request.id, "", finish_reason=self._reasons.pop(0)))


@pytest.mark.timeout(20)
def test_work_beside_an_engine_has_its_result_or_its_error() -> None:
    def end() -> None:
        raise SystemExit(3)

    assert serve_beside(Engine(), lambda: 7) == 7  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        serve_beside(Engine(), end)  # type: ignore[arg-type]


@pytest.mark.timeout(20)
def test_an_engine_that_ends_does_not_wait_for_the_work_beside_it() -> None:
    never = threading.Event()
    with pytest.raises(EngineError, match="the engine failed"):
        serve_beside(Engine(error=EngineError("the engine failed")), never.wait)  # type: ignore[arg-type]
    never.set()


@pytest.mark.timeout(20)
def test_prompts_are_complete_unless_one_ends_with_an_error() -> None:
    engine, params = Engine("length", "stop"), SamplingParams()
    complete(engine, [[5], [6, 7]], params, "first")  # type: ignore[arg-type]
    assert engine.asked == [("first-0", (5,)), ("first-1", (6, 7))]
    with pytest.raises(EngineError, match="ended with error, expected a completion"):
        complete(Engine("length", "error"), [[5], [6]], params, "first")  # type: ignore[arg-type]


_PROFILE = """
import threading
from medusa_vllm.cpu.kv_profile import main

main()
print([thread.name for thread in threading.enumerate()])
"""


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; see `make test-vllm`")
def test_nothing_but_the_forward_runs_while_its_memory_is_measured(tmp_path: Path) -> None:
    """An idle engine would mount vLLM's own server, which takes tens of MB, and has sockets in the temporary folder."""
    settings = json.dumps(asdict(Settings(engine="vllm", device="cpu", model=str(EXAMPLE))))
    command = [sys.executable, "-c", _PROFILE, str(EXAMPLE), str(tmp_path / "plan")]
    done = subprocess.run(command, input=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['MainThread']"
    assert json.loads((tmp_path / "plan").read_bytes())["activation_bytes"] < 20 << 20
