"""How long to insist on an object store that does not answer as it should."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import StorageError, UnreachableError


@dataclass(frozen=True)
class RetryPolicy:
    """Patience is counted from the last byte that arrived, so a long transfer may fail often, and a dead one soon."""

    attempts: int = 8
    patience_s: float = 20.0
    unreachable_attempts: int = 3
    stall_s: float = 10.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 4.0


class Transient(Exception):
    """Worth another try. ``error`` is what the user sees when there is none; ``retry_after_s`` is the server's wish."""

    def __init__(self, error: StorageError, retry_after_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.retry_after_s = retry_after_s


class Patience:
    """One operation's tries: call ``again`` after each that failed; it sleeps, or raises the error for good."""

    def __init__(self, policy: RetryPolicy, sleep: Callable[[float], None] = time.sleep) -> None:
        self._policy = policy
        self._sleep = sleep
        self._reset()

    def _reset(self) -> None:
        self._failed = 0
        self._deadline = time.monotonic() + self._policy.patience_s

    def progressed(self) -> None:
        """Bytes have arrived: the next failure is the first again."""
        if self._failed:
            self._reset()
        else:
            self._deadline = time.monotonic() + self._policy.patience_s

    def again(self, cause: Transient) -> None:
        """Full jitter (a random part of a doubling pause), so that many readers do not come back at once."""
        import random  # 10 ms, and most fetches never fail

        self._failed += 1
        unreachable = isinstance(cause.error, UnreachableError)
        most = self._policy.unreachable_attempts if unreachable else self._policy.attempts
        longest = min(self._policy.first_pause_s * 2 ** (self._failed - 1), self._policy.longest_pause_s)
        pause = longest * (0.5 + random.random() / 2)
        if cause.retry_after_s is not None:
            pause = max(pause, cause.retry_after_s)
        if self._failed >= most or time.monotonic() + pause > self._deadline:
            raise type(cause.error)(f"{cause.error} (tried {self._failed} times)") from None
        self._sleep(pause)
