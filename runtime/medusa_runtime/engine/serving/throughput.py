"""Measures the rate at which requests finish, to say when a refused request should be tried again."""

from __future__ import annotations

import time
from collections import deque

_UNKNOWN_S = 5.0  # the answer before any request has ended
_LEAST_S, _MOST_S = 1.0, 120.0
_WINDOW = 32


class Throughput:
    """The times at which the last requests ended."""

    def __init__(self) -> None:
        self._ended: deque[float] = deque(maxlen=_WINDOW)
        self._busy_since: float | None = None

    def start(self) -> None:
        """Note that the engine has work again, and forget older times: they say nothing about the present queue."""
        self._busy_since = time.monotonic()
        self._ended.clear()

    def record_end(self) -> None:
        self._ended.append(time.monotonic())

    def retry_after_s(self, waiting: int) -> float:
        """Estimate the seconds until half of the ``waiting`` requests have been served; between 1 and 120."""
        if not self._ended or self._busy_since is None:
            return _UNKNOWN_S
        since = self._ended[0] if len(self._ended) == _WINDOW else self._busy_since
        each_s = (time.monotonic() - since) / len(self._ended)
        return min(max(each_s * waiting / 2, _LEAST_S), _MOST_S)
