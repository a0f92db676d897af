"""The free blocks of the KV cache."""

from __future__ import annotations


class BlockPool:
    """Hands out block numbers. Freed blocks are reused first, since a fresh block needs new pages of memory."""

    def __init__(self, blocks: int, first: int = 0) -> None:
        """Start with ``blocks`` free blocks, numbered from ``first`` on."""
        self.blocks = blocks
        self._first = first
        self._fresh = 0
        self._freed: list[int] = []

    @property
    def free(self) -> int:
        return self.blocks - self._fresh + len(self._freed)

    @property
    def used(self) -> int:
        return self._fresh - len(self._freed)

    def limit(self, blocks: int) -> None:
        """Reduce the pool to at most this many blocks. Call it before any block has been taken."""
        assert self._fresh == 0
        self.blocks = min(self.blocks, blocks)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks, and return their numbers; None, with nothing taken, if fewer are free."""
        if count > self.free:
            return None
        reused = min(count, len(self._freed))
        taken = [self._freed.pop() for _ in range(reused)]
        taken.extend(range(self._first + self._fresh, self._first + self._fresh + count - reused))
        self._fresh += count - reused
        return taken

    def release(self, blocks: list[int]) -> None:
        self._freed.extend(reversed(blocks))
