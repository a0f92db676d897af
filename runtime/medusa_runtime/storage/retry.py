"""Retries of an object store that does not answer as it should."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ..errors import StorageError, UnreachableError

T = TypeVar("T")
_MOST_DOUBLINGS = 100  # a count of failures may become too large for a power of two


def doubling_pause_s(failures: int, first_s: float, longest_s: float) -> float:
    """Return how long to wait after so many failures in a row: ``first_s``, then twice as long after each."""
    return min(first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), longest_s) if failures else 0.0


@dataclass(frozen=True)
class RetryPolicy:
    """The number of tries, and how long to go on trying.

    Patience is counted from the last progress, so a long transfer may fail often, and a dead one only for a short time.
    Progress is what arrives at ``least_bytes_per_s`` or faster: a server that trickles bytes cannot hold a fetch.
    """

    attempts: int = 8
    patience_s: float = 20.0
    unreachable_attempts: int = 3
    stall_s: float = 10.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 4.0
    least_bytes_per_s: float = 1024.0


class Transient(Exception):
    """A failure that is worth another try.

    ``error`` is what the user sees when that fails, too; ``retry_after_s`` is how long the server asks to wait.
    """

    def __init__(self, error: StorageError, retry_after_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.retry_after_s = retry_after_s


def persist(policy: RetryPolicy, attempt: Callable[[], T]) -> T:
    """Return what ``attempt`` returns, which is called again as long as it raises Transient and the policy lasts."""
    patience = Patience(policy)
    while True:
        try:
            return attempt()
        except Transient as cause:
            patience.again(cause)


class Patience:
    """The tries of one operation: ``again`` after each that failed sleeps, or raises the error for good."""

    def __init__(self, policy: RetryPolicy, sleep: Callable[[float], None] = time.sleep) -> None:
        self._policy = policy
        self._sleep = sleep
        self._reset()

    def _reset(self) -> None:
        self._failed = 0
        self._bytes = 0
        self._since = time.monotonic()

    def progressed(self, count: int) -> None:
        """Count bytes that have arrived; once they came fast enough, the next failure is the first again."""
        self._bytes += count
        if self._bytes >= self._policy.least_bytes_per_s * (time.monotonic() - self._since):
            self._reset()

    @property
    def is_over(self) -> bool:
        """Whether bytes arrive, but for too long too slowly."""
        return time.monotonic() > self._since + self._policy.patience_s

    def paused(self, seconds: float) -> None:
        """Leave out time in which the reader itself has held up the transfer."""
        self._since += seconds

    def again(self, cause: Transient) -> None:
        """Sleep for a random part of a doubling pause (full jitter), so that many readers do not come back at once."""
        import random  # 10 ms, and most fetches never fail

        self._failed += 1
        unreachable = isinstance(cause.error, UnreachableError)
        most = self._policy.unreachable_attempts if unreachable else self._policy.attempts
        longest = doubling_pause_s(self._failed, self._policy.first_pause_s, self._policy.longest_pause_s)
        pause = longest * (0.5 + random.random() / 2)
        if cause.retry_after_s is not None:
            pause = max(pause, cause.retry_after_s)
        if self._failed >= most or time.monotonic() + pause > self._since + self._policy.patience_s:
            raise type(cause.error)(f"{cause.error} (tried {self._failed} times)") from None
        self._sleep(pause)
