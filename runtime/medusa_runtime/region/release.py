"""Free a region's memory layer by layer, while it is still being filled and read (Cicada §3.3)."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..checkpoint.index import PAGE_BYTES, WeightIndex
from ..errors import MedusaError
from .layout import Word
from .pages import drop_pages

if TYPE_CHECKING:
    from .reader import Region

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_LOOK_S = 0.02  # between looks for tensors that nobody reads


class Release:
    """The parts of a region that its reader has released. This is only for a region with a single reader.

    Pages of the memfd are freed for all processes. Pages of a local file are only unmapped in this process, and remain
    in the page cache.
    """

    def __init__(self, fd: int, index: WeightIndex, origin: Callable[[int], tuple[int, int]]) -> None:
        """``fd`` is the region's memfd, and ``origin`` its method ``Region.origin``."""
        self._fd = fd
        self._index = index
        self._shared = _shared(index)
        self._origin = origin
        self._intervals: dict[int, Intervals] = {}
        self.names: set[str] = set()
        self.peak_bytes = 0
        self._bytes = 0
        self._lock = threading.Lock()

    def tensor(self, name: str) -> None:
        """Release one tensor. A page is freed with the last tensor on it; shared bytes with the last that has them."""
        with self._lock:
            if name not in self.names:
                self._tensor(name)

    def _tensor(self, name: str) -> None:
        shard, start, stop, *_ = self._index.tensors[name]
        self.names.add(name)
        self.peak_bytes = max(self.peak_bytes, os.fstat(self._fd).st_blocks * 512)
        if (shared := self._shared.get(name)) is not None:
            if not self.names.issuperset(shared.names):
                return
            start, stop = shared.start, shared.stop
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


class UnreadRelease:
    """Releases tensors that nobody reads, in a thread, each once it has come: before that, it has no memory to free."""

    def __init__(self, region: Region, names: Sequence[str]) -> None:
        self._stopped = threading.Event()
        arguments = region, names
        self._thread = threading.Thread(target=self._run, args=arguments, name="medusa-release", daemon=True)
        self._thread.start()

    def _run(self, region: Region, names: Sequence[str]) -> None:
        try:
            for name in names:
                while not self._stopped.is_set() and not region.has(name):
                    region.wait_for_more(region.fetched_bytes, 0)
                    self._stopped.wait(_LOOK_S)
                if self._stopped.is_set():
                    return
                region.release(name)
        except MedusaError:
            pass  # what ended the fetch, which its readers raise

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()


class _Shared(NamedTuple):
    """Tensors whose bytes overlap, and where they lie in their shard: tied weights of a pickled checkpoint."""

    start: int
    stop: int
    names: list[str]


def _shared(index: WeightIndex) -> dict[str, _Shared]:
    """Return the tensors that share bytes with others, by name."""
    found, last, shard = list[_Shared](), _Shared(0, 0, []), -1
    for name, entry in sorted(index.tensors.items(), key=lambda item: item[1][:3]):
        if entry.start == entry.stop:
            continue
        if entry.shard == shard and entry.start < last.stop:
            last = found[-1] = _Shared(last.start, max(last.stop, entry.stop), [*last.names, name])
        else:
            shard, last = entry.shard, _Shared(entry.start, entry.stop, [name])
            found.append(last)
    return {name: one for one in found if len(one.names) > 1 for name in one.names}


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
