"""A limit on the memory that answers take in a gateway, all requests together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from medusa_runtime.container_limits import memory_available_bytes

_MOST_BYTES = 1024 * 10**6
_LEAST_BYTES = 16 * 10**6
_PART = 4  # of the available memory: with their copies, answers take up to twice what they count


def default_total_bytes(root: Path = Path("/")) -> int:
    """Return the memory for answers where none is set: a quarter of what is available, from 16 to 1,024 MB.

    All files about the memory are read below ``root``.
    """
    return min(max(memory_available_bytes(root) // _PART, _LEAST_BYTES), _MOST_BYTES)


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
