"""Offline work that lets an engine serve: its result, and what ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from medusa_runtime.engine.base import Delta, GenerateRequest, SamplingParams
from medusa_runtime.errors import DeviceError, EngineError
from medusa_vllm.offline import complete, serve_beside


class Engine:
    """Ends each request at once."""

    def __init__(self, reason: str = "length", broken: Exception | None = None) -> None:
        self.asked: list[tuple[int, ...]] = []
        self._reason, self._broken = reason, broken
        self._loaded = threading.Event()

    def run(self, stop: threading.Event) -> None:
        self._loaded.set()
        if self._broken is not None:
            raise self._broken
        assert stop.wait(20)

    def wait_ready(self) -> None:
        self._loaded.wait()
        if self._broken is not None:
            raise self._broken

    def add(self, request: GenerateRequest, sink: Callable[[Delta], None]) -> None:
        assert isinstance(request.prompt, tuple)
        self.asked.append(request.prompt)
        sink(Delta(request.id, "x"))
        sink(Delta(request.id, "", finish_reason=self._reason))


PARAMS = SamplingParams(max_tokens=2)


def test_the_engine_serves_until_the_work_is_done() -> None:
    engine: Any = Engine()
    assert serve_beside(engine, lambda: complete(engine, [[1], [2, 3]], PARAMS, "r") or "done") == "done"
    assert engine.asked == [(1,), (2, 3)]


def test_a_request_that_is_not_completed_ends_the_work() -> None:
    engine: Any = Engine("error")
    with pytest.raises(EngineError, match="a prompt of 2 tokens ended with error, expected a completion"):
        serve_beside(engine, lambda: complete(engine, [[1, 2]], PARAMS, "r"))


def test_an_engine_that_cannot_load_is_asked_nothing() -> None:
    engine: Any = Engine(broken=DeviceError("no GPU"))
    with pytest.raises(DeviceError, match="no GPU"):
        serve_beside(engine, lambda: pytest.fail("it was asked"))
    assert engine.asked == []
