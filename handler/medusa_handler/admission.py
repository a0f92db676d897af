"""How many requests are let in. Health routes never ask here, so they never queue behind work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from medusa_runtime.errors import OverloadedError

from .faults import ClientGoneError, not_ready

_POLL_S = 0.25  # how soon a client that left is noticed


class Admission:
    """At most ``running`` requests work and ``waiting`` more wait; the next one is refused with 429."""

    def __init__(self, running: int, waiting: int) -> None:
        self._running_limit = running
        self._waiting_limit = waiting
        self._changed = threading.Condition()
        self.in_flight = 0
        self.running = 0
        self.refused = 0

    def enter(self, ready: bool) -> None:
        """Count a request in. Raises OverloadedError; before the function is ready all requests are waiting ones."""
        limit = self._waiting_limit + (self._running_limit if ready else 0)
        with self._changed:
            if self.in_flight >= limit:
                self.refused += 1
                raise OverloadedError(f"{self.in_flight} requests are in flight, the limit is {limit}; try again later")
            self.in_flight += 1

    def leave(self) -> None:
        with self._changed:
            self.in_flight -= 1
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Until no request is in flight."""
        with self._changed:
            return self._changed.wait_for(lambda: self.in_flight == 0, timeout_s)

    def start(self, gone: Callable[[], bool], timeout_s: float) -> None:
        """Wait for one of the running slots. Raises ClientGoneError, or 503 after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self.running >= self._running_limit:
                self._changed.wait(_POLL_S)
                if self.running < self._running_limit:
                    break
                if gone():
                    raise ClientGoneError
                if time.monotonic() > deadline:
                    raise not_ready(f"no slot became free within {timeout_s:g} s; {self.running} requests are running")
            self.running += 1

    def finish(self) -> None:
        with self._changed:
            self.running -= 1
            self._changed.notify_all()
