"""The time limit of a request."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from .faults import ApiError, ClientGoneError

_POLL_S = 0.25  # how soon a client that left is noticed

client_gone: contextvars.ContextVar[Callable[[], bool]] = contextvars.ContextVar("client_gone")
"""Returns whether the client of the running request has left. Then the function's calls of the model are cancelled."""


class _Threads:
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


_threads = _Threads()


class Deadline:
    """A check whether the client has left, like ``gone``, which it wraps. It raises ApiError 504 when time is over.

    The time is ``limit_s`` seconds from ``began`` (``time.monotonic``). Everything that waits calls the check now and
    then, so calls of the model and coroutines end in time. Plain user code cannot be interrupted: it is left to end in
    its own thread, and its result is dropped.
    """

    def __init__(self, limit_s: float, began: float, gone: Callable[[], bool]) -> None:
        self._limit_s = limit_s
        self._end = began + limit_s
        self._gone = gone

    def __call__(self) -> bool:
        if time.monotonic() >= self._end:
            raise ApiError(504, f"the request took longer than {self._limit_s:g} s", code="timeout")
        return self._gone()

    def run(self, call: Callable[[], Any]) -> Any:
        """Return or raise what ``call()`` does. Raises ApiError 504 when time is over, and ClientGoneError."""
        outcome: list[tuple[Any, BaseException | None]] = []
        done = threading.Event()

        def work() -> None:
            try:
                outcome.append((call(), None))
            except BaseException as error:  # noqa: BLE001 it is raised again where it is waited for
                outcome.append((None, error))
            done.set()

        _threads.run(partial(contextvars.copy_context().run, work))
        while not done.wait(min(_POLL_S, max(0.0, self._end - time.monotonic()))):
            if self():
                raise ClientGoneError
        result, error = outcome[0]
        if error is not None:
            raise error
        return result
