"""A request's time limit."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from typing import Any

from ..faults import ApiError, ClientGoneError

_POLL_S = 0.25  # how soon a client that left is noticed


class Deadline:
    """Tells, like the function that it wraps, whether the client has left; raises ApiError 504 when time is over.

    Everything that waits asks it now and then, so model work and coroutines end with it. Plain user code cannot be
    interrupted: it is left to end in its own thread, unanswered.
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
        """What ``call()`` returns or raises, if it does so in time."""
        outcome: list[tuple[Any, BaseException | None]] = []
        done = threading.Event()

        def work() -> None:
            try:
                outcome.append((call(), None))
            except BaseException as error:  # noqa: BLE001 it is raised again where it is waited for
                outcome.append((None, error))
            done.set()

        threading.Thread(target=contextvars.copy_context().run, args=(work,), name="limited", daemon=True).start()
        while not done.wait(min(_POLL_S, max(0.0, self._end - time.monotonic()))):
            if self():
                raise ClientGoneError
        result, error = outcome[0]
        if error is not None:
            raise error
        return result
