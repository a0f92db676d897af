"""Calls that other threads post to the engine's own thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ...errors import EngineError

_Result = TypeVar("_Result")


class Inbox:
    """A queue of calls for the thread that owns the sequences and the cache, which makes them between two steps."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], object]] = deque()
        self._arrived = threading.Condition()
        self._closed = False

    def post(self, function: Callable[[], object]) -> None:
        with self._arrived:
            if not self._closed:
                self._calls.append(function)
                self._arrived.notify()

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Post a call, and wait for its result.

        Raises what the call raises, and EngineError if the inbox was closed before the call was made.
        """
        answer: Future[_Result] = Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that asked
                answer.set_exception(error)

        self.post(run)
        while True:
            try:
                return answer.result(0.1)
            except TimeoutError:
                if self._closed and not answer.done():
                    raise EngineError("the engine is stopping") from None

    def run_pending(self) -> None:
        """Make all calls that have been posted. Only the engine's thread calls this."""
        while self._calls:
            self._calls.popleft()()

    def wait(self, timeout_s: float) -> None:
        with self._arrived:
            if not self._calls and not self._closed:
                self._arrived.wait(timeout_s)

    def close(self) -> None:
        with self._arrived:
            self._closed = True
            self._calls.clear()
            self._arrived.notify_all()
