"""Which blocks of the KV cache are free."""

from __future__ import annotations


class BlockPool:
    """Hands out block numbers. Freed ones come first: their pages are in memory already, fresh ones would cost more."""

    def __init__(self, blocks: int, first: int = 0) -> None:
        """``blocks`` of them, numbered from ``first`` on."""
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
        """Hand out at most so many blocks from now on; only before any was handed out."""
        assert self._fresh == 0
        self.blocks = min(self.blocks, blocks)

    def take(self, count: int) -> list[int] | None:
        """That many blocks, or None (and nothing taken) when there are fewer."""
        if count > self.free:
            return None
        reused = min(count, len(self._freed))
        taken = [self._freed.pop() for _ in range(reused)]
        taken.extend(range(self._first + self._fresh, self._first + self._fresh + count - reused))
        self._fresh += count - reused
        return taken

    def give(self, blocks: list[int]) -> None:
        self._freed.extend(reversed(blocks))
