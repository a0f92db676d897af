"""A limit on the memory that answers take in a gateway, all requests together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class AnswerMemory:
    """The memory for answers. ``used_bytes`` is what they take now."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        """Lend a request its share for as long as the block runs."""
        share = Share(self)
        try:
            yield share
        finally:
            share.release()


class Share:
    """One request's share of the memory for answers."""

    def __init__(self, memory: AnswerMemory) -> None:
        self._memory = memory
        self._size_bytes = 0

    @property
    def total_bytes(self) -> int:
        """The memory for the answers of all requests."""
        return self._memory.total_bytes

    def resize(self, size_bytes: int) -> bool:
        """Let the share be of this size. Return False, and leave it as it is, if there is not as much memory."""
        more_bytes = size_bytes - self._size_bytes
        if more_bytes > 0 and self._memory.used_bytes + more_bytes > self._memory.total_bytes:
            return False
        self._memory.used_bytes += more_bytes
        self._size_bytes = size_bytes
        return True

    def release(self) -> None:
        self.resize(0)
