"""A warm-up before the model arrives, with an engine that says whether it had to wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.engine.base import Delta, GenerateRequest
from medusa_runtime.engine.warmup import warm_up
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

Sink = Callable[[Delta], None]
EVENTS: list[str] = []


class AnsweringEngine:
    """Answers requests in the order of their arrival, and then looks at its stop event, as an engine without work."""

    def __init__(self, _region: Region, _settings: Settings, _timeline: Timeline) -> None:
        self._requests = queue.SimpleQueue[tuple[GenerateRequest, Sink]]()

    def add(self, request: GenerateRequest, sink: Sink) -> None:
        self._requests.put((request, sink))

    def run(self, stop: threading.Event) -> None:
        while True:
            request, sink = self._requests.get(timeout=10)
            sink(Delta(request.id, "a"))
            sink(Delta(request.id, "b", finish_reason="length"))
            EVENTS.append(f"{request.id}, {'stopped' if stop.is_set() else 'goes on'}")
            if stop.is_set():
                return

    def close(self) -> None:
        EVENTS.append("closed")


class EngineWithServer(AnsweringEngine):
    def warm_up_server(self) -> None:
        EVENTS.append("server")


_SERVED = ["first, goes on", "server", "last, stopped", "closed"]


@pytest.mark.parametrize(
    ("engine", "events"), [(AnsweringEngine, ["last, stopped", "closed"]), (EngineWithServer, _SERVED)]
)
def test_an_engine_is_stopped_as_soon_as_it_has_answered(engine: type[AnsweringEngine], events: list[str]) -> None:
    """It never waits for work: an idle engine looks at its stop event five times a second."""
    EVENTS.clear()
    warm_up(engine, Settings(device="cpu"))  # type: ignore[arg-type]
    assert events * 2 == EVENTS, "for both dtypes"
