"""What readers tell the prefetcher through a region's header: fetch this first, a forward waits for it.

A ring of words, one request each: whoever waits overwrites one, and asks again while it waits, so a lost request costs
milliseconds. A reader maps the region read-only; it writes its word with one aligned ``pwrite``. Readers of a
region that is sealed against them (a node agent's) have a ring in a memfd of its own.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterable, Iterator, Sequence

from .layout import F_ADD_SEALS, HEADER_BYTES, RING_OFFSET, RING_WORDS, SEAL_GROW, SEAL_SHRINK

_FIRST_BITS = 32
_HINT = 1 << 63
_PROMOTE_WORD = 0  # of a memory that has only a ring
_MOST = RING_WORDS // 2  # what one asker may have in the ring


def runs(chunks: Iterable[int]) -> list[range]:
    """Neighbouring chunks together, in ascending order."""
    found: list[range] = []
    for chunk in sorted(set(chunks)):
        if found and found[-1].stop == chunk:
            found[-1] = range(found[-1].start, chunk + 1)
        else:
            found.append(range(chunk, chunk + 1))
    return found


def demand_memory() -> int:
    """A memfd with a ring alone, for readers who may write nothing of the region; nobody can make it shorter."""
    fd = os.memfd_create("medusa-demand", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, HEADER_BYTES)
    fcntl.fcntl(fd, F_ADD_SEALS, SEAL_SHRINK | SEAL_GROW)
    return fd


def promote(demand_fd: int) -> None:
    """Tell the prefetcher of a region with a ``demand_memory`` that somebody waits for it, if it did not know."""
    os.pwrite(demand_fd, (1).to_bytes(8, "little"), _PROMOTE_WORD * 8)


def promoted(words: memoryview) -> bool:
    """Whether anybody said so; ``words`` is that memory."""
    return bool(words[_PROMOTE_WORD])


def demand(fd: int, chunks: Iterable[int]) -> None:
    """Ask for these chunks. Nothing happens where the region cannot be written to: complete, or a stranger's."""
    _tell(fd, [(len(run) << _FIRST_BITS) | (run.start + 1) for run in runs(chunks)], 0)


def hint(fd: int, chunks: Sequence[int]) -> None:
    """Say which chunks would be needed next, in this order, by a reader whose forward does not wait yet."""
    _tell(fd, [_HINT | (place << _FIRST_BITS) | (chunk + 1) for place, chunk in enumerate(chunks)], _MOST)


def _tell(fd: int, words: Sequence[int], behind: int) -> None:
    slot = os.getpid() * 7 + threading.get_native_id() + behind
    for number, word in enumerate(words[:_MOST]):
        try:
            os.pwrite(fd, word.to_bytes(8, "little"), RING_OFFSET + (slot + number) % RING_WORDS * 8)
        except OSError:
            return


def demanded(words: memoryview) -> Iterator[range]:
    """What is in the ring; ``words`` is the header's."""
    for word in _ring(words):
        if word and not word & _HINT:
            start = (word & ((1 << _FIRST_BITS) - 1)) - 1
            yield range(start, start + (word >> _FIRST_BITS))


def hinted(words: memoryview) -> list[int]:
    """The chunks that readers would like next, each reader's in its order."""
    hints = sorted(word & ~_HINT for word in _ring(words) if word & _HINT)
    return [(word & ((1 << _FIRST_BITS) - 1)) - 1 for word in hints]


def _ring(words: memoryview) -> list[int]:
    first = RING_OFFSET // 8
    return words[first : first + RING_WORDS].tolist()
