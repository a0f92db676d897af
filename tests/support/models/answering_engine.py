"""An engine that loads something, and then ends each request at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

from medusa_runtime.engine.base import Delta, GenerateRequest


class AnsweringEngine:
    info = SimpleNamespace(vocab_size=64, max_model_len=64)

    def __init__(
        self,
        load: Callable[[], None] = lambda: None,
        reason: str = "length",
        step: Callable[[], object] | None = None,
    ) -> None:
        """``reason`` is why its requests end. If there is a ``step``, its thread runs one before it ends a request."""
        self.asked: list[str | tuple[int, ...]] = []
        self._load, self._reason, self._step = load, reason, step
        self._waiting: list[tuple[GenerateRequest, Callable[[Delta], None]]] = []
        self._loaded = threading.Event()
        self._error: Exception | None = None

    def run(self, stop: threading.Event) -> None:
        try:
            self._load()
        except Exception as error:
            self._error = error
            raise
        finally:
            self._loaded.set()
        while not stop.wait(0.01):
            while self._waiting and self._step is not None:
                self._step()
                self._end(*self._waiting.pop(0))

    def wait_ready(self) -> None:
        self._loaded.wait()
        if self._error is not None:
            raise self._error

    def add(self, request: GenerateRequest, sink: Callable[[Delta], None]) -> None:
        self.asked.append(request.prompt)
        if self._step is None:
            self._end(request, sink)
        else:
            self._waiting.append((request, sink))

    def _end(self, request: GenerateRequest, sink: Callable[[Delta], None]) -> None:
        sink(Delta(request.id, "x"))
        sink(Delta(request.id, "", finish_reason=self._reason))
