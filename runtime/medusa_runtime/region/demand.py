"""Requests of readers to the prefetcher, through a region's header: fetch this first, a forward waits for it.

The header has a ring of words, one for each request. A waiting reader overwrites a word, and repeats that while it
waits, so a lost request costs milliseconds. A reader maps the region read-only; it writes its word with one aligned
``pwrite``. Readers that may not write to the region (a node agent's) have a ring in a separate memfd.
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
_PROMOTE_WORD = 0  # its index in a ``demand_memory``
_MOST = RING_WORDS // 2  # what one reader may have in the ring
_SHARE_BITS = 10
_WHOLE = 1000  # of the link, in a pace's word; the bits above it are the millisecond in which it ends


def runs(chunks: Iterable[int]) -> list[range]:
    """Return the chunks as runs of neighbours, in ascending order."""
    found: list[range] = []
    for chunk in sorted(set(chunks)):
        if found and found[-1].stop == chunk:
            found[-1] = range(found[-1].start, chunk + 1)
        else:
            found.append(range(chunk, chunk + 1))
    return found


def demand_memory() -> int:
    """Make a memfd with only a ring, for readers that may not write to the region. It cannot be made shorter."""
    from .seals import seal_size  # only a node agent needs it, and every start imports this module

    fd = os.memfd_create("medusa-demand", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, HEADER_BYTES)
    seal_size(fd)
    return fd


def promote(demand_fd: int) -> None:
    """Report to the prefetcher, through a ``demand_memory``, that a reader waits for the whole region."""
    os.pwrite(demand_fd, (1).to_bytes(8, "little"), _PROMOTE_WORD * 8)


def demand(fd: int, chunks: Iterable[int]) -> None:
    """Ask for these chunks. Nothing happens where the region cannot be written to any more."""
    _ask(fd, [(len(run) << _FIRST_BITS) | (run.start + 1) for run in runs(chunks)], 0)


def hint(fd: int, chunks: Sequence[int]) -> None:
    """Name the chunks that a reader will need next, in this order, although no forward waits for them yet."""
    _ask(fd, [_HINT | (place << _FIRST_BITS) | (chunk + 1) for place, chunk in enumerate(chunks)], _MOST)


def pace(fd: int, share: float, lease_s: float) -> None:
    """Have what nobody waits for fetched with this share of the link; 0: not at all. It counts for ``lease_s``.

    A reader renews it as long as it wants it, so that one that has ended holds nothing up.
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
    """The rings that the prefetcher reads: the region header's and, after ``listen``, that of a ``demand_memory``."""

    def __init__(self, memory: WriterMemory) -> None:
        self._memory = memory
        self._outside: memoryview | None = None
        self._paced = True

    def listen(self, demand_fd: int, *, paced: bool = True) -> None:
        """Also heed readers that may not write to the region; ``demand_fd`` is a ``demand_memory``.

        ``paced``: they may hold back what nobody waits for; not those of many users, who could do so to one another.
        """
        self._paced = paced
        self._outside = memoryview(mmap.mmap(demand_fd, HEADER_BYTES, prot=mmap.PROT_READ)).cast("Q")

    @property
    def promoted(self) -> bool:
        """Whether a reader has begun to wait for the whole region, which was fetched in the background."""
        return self._outside is not None and bool(self._outside[_PROMOTE_WORD])

    @property
    def share(self) -> float:
        """The share of the link for what nobody waits for, as readers want it now; 1 without a wish."""
        now_ms = time.monotonic() * 1e3
        place = PACE_OFFSET // 8
        memories = (self._memory.words, self._outside if self._paced else None)
        words = [memory[place] for memory in memories if memory is not None]
        shares = [word & (1 << _SHARE_BITS) - 1 for word in words if word >> _SHARE_BITS > now_ms]
        return min(shares, default=_WHOLE) / _WHOLE

    def demanded(self, count: int) -> list[range]:
        """Return the runs of chunks that forwards wait for, within the region's ``count``; some may have come since."""
        found = []
        for word in chain.from_iterable(self._rings()):
            if word and not word & _HINT:
                first = (word & _FIRST_MASK) - 1
                found.append(range(max(first, 0), min(first + (word >> _FIRST_BITS), count)))
        return found

    def hinted(self, count: int) -> list[int]:
        """Return the chunks that readers would like next, each reader's in its order."""
        found = []
        for ring in self._rings():
            hints = sorted(word & ~_HINT for word in ring if word & _HINT)
            found += [chunk for word in hints if (chunk := (word & _FIRST_MASK) - 1) < count]
        return found

    def _rings(self) -> list[list[int]]:
        first = RING_OFFSET // 8
        memories = [self._memory.words] if self._outside is None else [self._memory.words, self._outside]
        return [words[first : first + RING_WORDS].tolist() for words in memories]
