"""A limit on the log-probabilities that all answers keep in memory together until they are sent."""

from __future__ import annotations

import threading
from itertools import islice
from pathlib import Path

_LEAST = 4_000_000  # four answers of the largest size
_EACH_BYTES = 300  # of a prompt; 170 of a generated token
_PART = 8  # of the memory that this process may have when the first one comes

_OLDEST = 2  # answers that may always go on


class LogprobBudget:
    """How many log-probabilities the answers of this process keep. ``used`` may be read by any thread.

    ``most`` is an eighth of the memory that is available when the first ones come, and at least 4,000,000. The two
    oldest answers may go on beyond it. Else all of many that grow at the same time would be refused, and none would
    ever be complete.
    """

    def __init__(self, most: int | None = None, root: Path = Path("/")) -> None:
        self._most = most
        self._root = root
        self._lock = threading.Lock()
        self._taken: dict[object, int] = {}  # by each answer, the oldest first
        self.used = 0

    @property
    def most(self) -> int:
        if self._most is None:
            from medusa_runtime.container_limits import memory_available_bytes  # a start does not need it

            self._most = max(_LEAST, memory_available_bytes(self._root) // _PART // _EACH_BYTES)
        return self._most

    def take(self, answer: object, count: int) -> bool:
        """Take room for so many of an answer. Return False, and take none, if there is not as much."""
        if not count:
            return True
        with self._lock:
            if self.used + count > self.most and answer not in islice(self._taken, _OLDEST):
                return False
            self._taken[answer] = self._taken.get(answer, 0) + count
            self.used += count
            return True

    def give_back(self, answer: object) -> None:
        """Free all room of an answer."""
        with self._lock:
            self.used -= self._taken.pop(answer, 0)


__all__ = ["LogprobBudget"]
