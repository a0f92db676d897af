"""The blocks of the KV cache: which are free, how many sequences use the others, and what free ones still hold."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import NamedTuple


class Content(NamedTuple):
    """A block, and the ``number`` of what it holds, which is never used for something else."""

    block: int
    number: int


class BlockPool:
    """Hands out block numbers. A block may have several users, and is free when all of them have released it.

    Freed blocks are reused first, since a fresh block needs new pages of memory. Up to ``most_kept`` free blocks whose
    content has a key are kept, in case somebody asks for it. They are taken last, the least recently used one first.
    """

    def __init__(self, blocks: int, first: int = 0) -> None:
        """Start with ``blocks`` free blocks, numbered from ``first`` on."""
        self.blocks = blocks
        self.most_kept = 0
        self._first = first
        self._fresh = 0
        self._freed: list[int] = []
        self._users: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._numbers = itertools.count(1)
        self._contents: dict[Hashable, Content] = {}
        self._keys: dict[int, Hashable] = {}  # of the blocks in ``_contents``

    @property
    def free(self) -> int:
        return self.blocks - len(self._users)

    @property
    def used(self) -> int:
        return len(self._users)

    def limit(self, blocks: int) -> None:
        """Reduce the pool to at most this many blocks. Call it before any block has been taken."""
        assert self._fresh == 0
        self.blocks = min(self.blocks, blocks)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks, and return their numbers; None, with nothing taken, if fewer are free."""
        if count > self.free:
            return None
        taken = [self._freed.pop() for _ in range(min(count, len(self._freed)))]
        fresh = min(count - len(taken), self.blocks - self._fresh)
        taken.extend(range(self._first + self._fresh, self._first + self._fresh + fresh))
        self._fresh += fresh
        while len(taken) < count:
            taken.append(self._give_up_oldest())
        self._users.update(dict.fromkeys(taken, 1))
        return taken

    def release(self, blocks: list[int]) -> None:
        """Note that a user needs these blocks no more. Of those that are kept, the last one will be taken first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                if block in self._keys:
                    self._kept[block] = None
                else:
                    self._freed.append(block)
        while len(self._kept) > self.most_kept:
            self._freed.append(self._give_up_oldest())

    def share(self, blocks: Iterable[int]) -> None:
        """Note a further user of blocks that ``find`` has returned."""
        for block in blocks:
            self._users[block] = self._users.get(block, 0) + 1
            self._kept.pop(block, None)

    def name(self, block: int, key: Hashable) -> Content:
        """Note that a used block holds what a key stands for. Return the content that has this key.

        That is another block's if that one had the key before. The block then has none.
        """
        content = self._contents.get(key)
        if content is None:
            content = self._contents[key] = Content(block, next(self._numbers))
            self._keys[block] = key
        return content

    def find(self, key: Hashable) -> Content | None:
        """Return the content that a key stands for, if a block holds it."""
        return self._contents.get(key)

    def forget(self) -> None:
        """Forget what all blocks hold."""
        self._freed += self._kept
        self._kept.clear()
        self._contents.clear()
        self._keys.clear()

    def _give_up_oldest(self) -> int:
        block, _ = self._kept.popitem(last=False)
        del self._contents[self._keys.pop(block)]
        return block
