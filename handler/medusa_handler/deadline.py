"""The time limit of a request."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from .disconnection import POLL_S
from .faults import ApiError, ClientDisconnectedError


class _ThreadPool:
    """Threads for user code, which are reused: the last one that became idle comes first.

    Code keeps things for each thread (connections, a team of OpenMP threads), so a new thread for each call would be
    slow. Their number has no limit, because a call that never ends must not make other requests wait.
    """

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Callable[[], None]]] = []

    def run(self, work: Callable[[], None]) -> None:
        """Run ``work``, which must not raise, in a thread. Return at once."""
        try:
            calls = self._idle.pop()
        except IndexError:
            calls = SimpleQueue()
            threading.Thread(target=self._serve, args=(calls,), name="limited", daemon=True).start()
        calls.put(work)

    def _serve(self, calls: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            calls.get()()
            self._idle.append(calls)


_threads = _ThreadPool()


class Deadline:
    """A check whether the client has left, around another one. It raises ApiError 504 when the request's time is over.

    The time is ``timeout_s`` seconds from ``began`` (``time.monotonic``). Everything that waits calls the check now and
    then, so calls of the model and coroutines end in time. Plain user code cannot be interrupted: it is left to end in
    its own thread, and its result is dropped.
    """

    def __init__(self, timeout_s: float, began: float, is_disconnected: Callable[[], bool]) -> None:
        self._timeout_s = timeout_s
        self._end = began + timeout_s
        self._is_disconnected = is_disconnected

    def __call__(self) -> bool:
        if time.monotonic() >= self._end:
            raise ApiError(504, f"the request took longer than {self._timeout_s:g} s", code="timeout")
        return self._is_disconnected()

    def run(self, call: Callable[[], Any]) -> Any:
        """Return or raise what ``call()`` does. Raises ApiError 504 when time is over, and ClientDisconnectedError."""
        outcome: list[tuple[Any, BaseException | None]] = []
        done = threading.Event()

        def work() -> None:
            try:
                outcome.append((call(), None))
            except BaseException as error:  # noqa: BLE001 it is raised again where it is waited for
                outcome.append((None, error))
            done.set()

        _threads.run(partial(contextvars.copy_context().run, work))
        while not done.wait(min(POLL_S, max(0.0, self._end - time.monotonic()))):
            if self():
                raise ClientDisconnectedError
        result, error = outcome[0]
        if error is not None:
            raise error
        return result
