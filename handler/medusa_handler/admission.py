"""Admits requests, up to a number and in order. Probes are not counted, so they never queue behind work."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable
from operator import itemgetter
from typing import NoReturn

from medusa_runtime.errors import OverloadedError

from .disconnection import POLL_S
from .faults import ApiError, ClientDisconnectedError, not_ready, stopping


class Admission:
    """The places for requests: at most ``running`` work and ``waiting`` more wait. The next one is refused with 429.

    Before the function is ready, every request waits, and one for which there is no place is refused with 503.
    """

    def __init__(self, running: int, waiting: int) -> None:
        self._running_limit = running
        self._waiting_limit = waiting
        self._changed = threading.Condition()
        self._queue: list[tuple[int, threading.Event]] = []  # in the order of arrival
        self._opened = False
        self.in_flight = 0
        self.running = 0
        self.refused = 0

    def enter(self, ready: bool, eta_s: Callable[[], float] = lambda: 1.0) -> None:
        """Give a request a place. If there is none, raises OverloadedError, or 503 while the function is not ready.

        ``eta_s`` returns the seconds that the 503 names in Retry-After.
        """
        with self._changed:
            if self.in_flight < self._limit(ready):
                self.in_flight += 1
                return
        self._refuse(ready, eta_s)

    def check(self, ready: bool, eta_s: Callable[[], float] = lambda: 1.0) -> None:
        """Raise what ``enter`` would raise, without giving the request a place."""
        if self.in_flight >= self._limit(ready):
            self._refuse(ready, eta_s)

    def _limit(self, ready: bool) -> int:
        return self._waiting_limit + self._running_limit if ready else self._waiting_limit or self._running_limit

    def _refuse(self, ready: bool, eta_s: Callable[[], float]) -> NoReturn:
        limit = self._limit(ready)
        with self._changed:
            self.refused += 1
        if ready:
            raise OverloadedError(f"{limit} requests are in flight, as many as may be; try again later")
        raise not_ready(f"it is still starting, and {limit} requests wait for it already, as many as may", eta_s())

    def leave(self) -> None:
        with self._changed:
            self.in_flight -= 1
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is in flight. Return False if some still are after ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: self.in_flight == 0, timeout_s)

    def open(self) -> None:
        """Let waiting requests begin, first come, first served."""
        with self._changed:
            self._opened = True
            self._advance()

    def start(
        self, is_disconnected: Callable[[], bool], timeout_s: float, draining: threading.Event, *, arrived: int = 0
    ) -> None:
        """Wait for one of the running slots, behind all requests with a smaller ``arrived``.

        Raises ClientDisconnectedError, and 503 after ``timeout_s`` or when the instance is stopped before it is ready.
        """
        deadline = time.monotonic() + timeout_s
        turn = threading.Event()
        waiting = (arrived, turn)
        with self._changed:
            bisect.insort(self._queue, waiting, key=itemgetter(0))
            self._advance()
        try:
            while not turn.wait(POLL_S):
                self._check(is_disconnected, draining)
                if time.monotonic() > deadline:
                    raise self._too_late(timeout_s)  # noqa: TRY301 what follows is for every error alike
        except BaseException:
            with self._changed:
                if turn.is_set():
                    self.running -= 1
                else:
                    self._queue.remove(waiting)
                self._advance()
            raise

    def finish(self) -> None:
        with self._changed:
            self.running -= 1
            self._advance()

    def _advance(self) -> None:
        while self._opened and self._queue and self.running < self._running_limit:
            self.running += 1
            self._queue.pop(0)[1].set()

    def _check(self, is_disconnected: Callable[[], bool], draining: threading.Event) -> None:
        if is_disconnected():
            raise ClientDisconnectedError
        if draining.is_set() and not self._opened:
            raise stopping()

    def _too_late(self, timeout_s: float) -> ApiError:
        if not self._opened:
            return not_ready(f"the function was not loaded within {timeout_s:g} s of the request")
        return not_ready(f"no slot became free within {timeout_s:g} s; {self.running} requests are running")
