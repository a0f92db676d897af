"""Free a region's memory layer by layer, while it is still being filled and read (Cicada §3.3)."""

from __future__ import annotations

import ctypes
import errno
import os
from bisect import bisect_left
from collections.abc import Callable

from ..checkpoint.index import PAGE_BYTES, WeightIndex
from .layout import Word
from .pages import drop_pages

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02


class Release:
    """The parts of a region that its reader has released. This is only for a region with a single reader.

    Pages of the memfd are freed for all processes. Pages of a local file are only unmapped in this process, and remain
    in the page cache.
    """

    def __init__(self, fd: int, index: WeightIndex, origin: Callable[[int], tuple[int, int]]) -> None:
        """``fd`` is the region's memfd, and ``origin`` its method ``Region.origin``."""
        self._fd = fd
        self._index = index
        self._origin = origin
        self._intervals: dict[int, Intervals] = {}
        self.names: set[str] = set()
        self.peak_bytes = 0
        self._bytes = 0

    def tensor(self, name: str) -> None:
        """Release one tensor. A page is freed with the last tensor on it."""
        shard, start, stop, *_ = self._index.tensors[name]
        self.names.add(name)
        self.peak_bytes = max(self.peak_bytes, os.fstat(self._fd).st_blocks * 512)
        base, address = self._origin(shard)
        begin, end = self._intervals.setdefault(shard, Intervals()).add(base + start, base + stop)
        if begin < end:
            if self._index.shards[shard].path is not None:
                drop_pages(address + begin, end - begin)
            else:
                punch_hole(self._fd, begin, end)
        self._bytes += stop - start
        try:
            os.pwrite(self._fd, self._bytes.to_bytes(8, "little"), Word.RELEASED_BYTES * 8)
        except OSError:
            pass  # the region is sealed: the fetch is over, and nothing waits for memory


class Intervals:
    """The released intervals [start, stop) of bytes, disjoint and in ascending order."""

    def __init__(self) -> None:
        self._intervals: list[tuple[int, int]] = []

    def add(self, start: int, stop: int) -> tuple[int, int]:
        """Add [start, stop), and return the pages, as bytes [begin, end), that are now released as a whole.

        Only pages that the new interval touches are returned. ``begin`` >= ``end`` means that there are none.
        """
        low, high = start - start % PAGE_BYTES, -(-stop // PAGE_BYTES) * PAGE_BYTES
        position = bisect_left(self._intervals, (start, stop))
        if position and self._intervals[position - 1][1] >= start:
            position -= 1
        while position < len(self._intervals) and self._intervals[position][0] <= stop:
            left, right = self._intervals.pop(position)
            start, stop = min(start, left), max(stop, right)
        self._intervals.insert(position, (start, stop))
        return max(low, -(-start // PAGE_BYTES) * PAGE_BYTES), min(high, stop - stop % PAGE_BYTES)


def punch_hole(fd: int, start: int, stop: int) -> None:
    """Free whole pages of a memfd, unless it is sealed against writing."""
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while call(fd, _KEEP_SIZE | _PUNCH_HOLE, start, stop - start):
        if ctypes.get_errno() != errno.EINTR:
            return
