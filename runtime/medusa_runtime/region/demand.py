"""Requests from readers to the prefetcher, through a region's header: which chunks to fetch first.

The header has a ring of words, one for each request. A reader that waits overwrites a word, and does so again while it
waits, so a lost request costs only milliseconds. Readers map the region read-only, so they write their words with an
aligned ``pwrite``. Readers that may not write to the region (a node agent's) have a ring in a separate memfd.

Word of a demand: the number of chunks (upper 32 bits), and the first chunk plus 1. Word of a hint: the top bit, the
place in the reader's order, and the chunk plus 1. A pace has a word of its own: when it ends, and the share.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from .layout import HEADER_BYTES, PACE_OFFSET, RING_OFFSET, RING_WORDS

if TYPE_CHECKING:
    from .memory import WriterMemory

_FIRST_BITS = 32
_FIRST_MASK = (1 << _FIRST_BITS) - 1
_HINT = 1 << 63
_PROMOTE_WORD = 0  # the index of that word in a demand memfd
_MOST = RING_WORDS // 2  # how many words one reader may write at a time
_SHARE_BITS = 10
_WHOLE = 1000  # the whole link, in a pace's word; the bits above the share are the millisecond in which it ends


def runs(chunks: Iterable[int]) -> list[range]:
    """Return the chunks as runs of neighbours, in ascending order."""
    found: list[range] = []
    for chunk in sorted(set(chunks)):
        if found and found[-1].stop == chunk:
            found[-1] = range(found[-1].start, chunk + 1)
        else:
            found.append(range(chunk, chunk + 1))
    return found


def create_demand_memfd() -> int:
    """Make a memfd with only a ring, for readers that may not write to the region. Its size is sealed.

    A reader cannot add seals: one against writing would also hold for the agent and the other readers.
    """
    from .seals import seal_size  # here, because only a node agent needs it, and every start imports this module

    fd = os.memfd_create("medusa-demand", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, HEADER_BYTES)
    seal_size(fd)
    return fd


def promote(demand_fd: int) -> None:
    """Tell the prefetcher, through a demand memfd, that a reader waits for the whole region."""
    os.pwrite(demand_fd, (1).to_bytes(8, "little"), _PROMOTE_WORD * 8)


def demand(fd: int, chunks: Iterable[int]) -> None:
    """Ask for these chunks, because a forward waits for them. Does nothing if the region is sealed against writing."""
    _ask(fd, [(len(run) << _FIRST_BITS) | (run.start + 1) for run in runs(chunks)], 0)


def hint(fd: int, chunks: Sequence[int]) -> None:
    """Name the chunks that a reader will need next, in this order. No forward waits for them yet."""
    _ask(fd, [_HINT | (place << _FIRST_BITS) | (chunk + 1) for place, chunk in enumerate(chunks)], _MOST)


def pace(fd: int, share: float, lease_s: float) -> None:
    """Limit the fetch of chunks that no reader waits for to a share of the link, from 0 (nothing) to 1 (no limit).

    The limit ends after ``lease_s`` seconds unless the reader renews it, so a reader that has ended holds nothing up.
    """
    ends_ms = int((time.monotonic() + lease_s) * 1e3)
    word = ends_ms << _SHARE_BITS | round(min(max(share, 0.0), 1.0) * _WHOLE)
    try:
        os.pwrite(fd, word.to_bytes(8, "little"), PACE_OFFSET)
    except OSError:
        pass


def _ask(fd: int, words: Sequence[int], behind: int) -> None:
    slot = os.getpid() * 7 + threading.get_native_id() + behind
    for number, word in enumerate(words[:_MOST]):
        try:
            os.pwrite(fd, word.to_bytes(8, "little"), RING_OFFSET + (slot + number) % RING_WORDS * 8)
        except OSError:
            return


class DemandRings:
    """The rings that the prefetcher reads: the region header's and, after ``listen``, that of a demand memfd."""

    def __init__(self, memory: WriterMemory) -> None:
        self._memory = memory
        self._outside: memoryview | None = None
        self._paced = True

    def listen(self, demand_fd: int, *, paced: bool = True) -> None:
        """Also read the requests in ``demand_fd``, a demand memfd for readers that may not write to the region.

        ``paced`` says whether their paces count. They should not if several users share the region, since one could
        hold up the others.
        """
        self._paced = paced
        self._outside = memoryview(mmap.mmap(demand_fd, HEADER_BYTES, prot=mmap.PROT_READ)).cast("Q")

    @property
    def promoted(self) -> bool:
        """Whether a reader has begun to wait for the whole region, which was fetched in the background."""
        return self._outside is not None and bool(self._outside[_PROMOTE_WORD])

    @property
    def share(self) -> float:
        """The share of the link for chunks that no reader waits for: the smallest pace of any reader, or 1."""
        now_ms = time.monotonic() * 1e3
        place = PACE_OFFSET // 8
        memories = (self._memory.words, self._outside if self._paced else None)
        words = [memory[place] for memory in memories if memory is not None]
        shares = [word & (1 << _SHARE_BITS) - 1 for word in words if word >> _SHARE_BITS > now_ms]
        return min(shares, default=_WHOLE) / _WHOLE

    def demanded(self, count: int) -> list[range]:
        """Return runs of chunks that forwards wait for, of the region's ``count`` chunks. Some may be there already.

        The runs are in ascending order, and have no chunk in common: a hostile reader may demand all chunks many times.
        """
        found: list[range] = []
        words = {word for word in chain.from_iterable(self._rings()) if word and not word & _HINT}
        for first, size in sorted(((word & _FIRST_MASK) - 1, word >> _FIRST_BITS) for word in words):
            start, stop = max(first, 0, found[-1].stop if found else 0), min(first + size, count)
            if start < stop:
                found.append(range(start, stop))
        return found

    def hinted(self, count: int) -> list[int]:
        """Return the chunks that readers have hinted at, of the region's ``count`` chunks, in the readers' order."""
        found = []
        for ring in self._rings():
            hints = sorted(word & ~_HINT for word in ring if word & _HINT)
            found += [chunk for word in hints if 0 <= (chunk := (word & _FIRST_MASK) - 1) < count]
        return found

    def _rings(self) -> list[list[int]]:
        first = RING_OFFSET // 8
        memories = [self._memory.words] if self._outside is None else [self._memory.words, self._outside]
        return [words[first : first + RING_WORDS].tolist() for words in memories]
