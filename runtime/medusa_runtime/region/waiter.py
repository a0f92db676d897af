"""Wait for another process to write to shared memory."""

from __future__ import annotations

import time

_LONGEST_S = 1e-3


class Waiter:
    """Sleeps between looks at shared memory: first for 20 µs, then longer, up to a millisecond.

    ``pause`` raises TimeoutError once ``timeout_s`` has passed; None waits for ever.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._pause_s = 20e-6
        self._next_check = self._began + 0.05

    def pause(self) -> None:
        if self._timeout_s is not None and time.monotonic() - self._began >= self._timeout_s:
            raise TimeoutError(f"nothing arrived in the region within {self._timeout_s:g} s")
        time.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 1.3, _LONGEST_S)

    def is_check_due(self) -> bool:
        """Return, every 50 ms, that it is time for a check that costs a system call."""
        now = time.monotonic()
        if now < self._next_check:
            return False
        self._next_check = now + 0.05
        return True
