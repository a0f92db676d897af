"""Find the memory range that contains an address."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from ..blueprint import MemoryRange, RangeKind


class Place(NamedTuple):
    """A byte of device memory: the number of its range, and the offset into it."""

    memory_range: int
    offset: int


class RangeMap:
    """Looks up addresses in ranges that do not overlap: in those in use or, with ``free``, in the unused ones."""

    def __init__(self, ranges: Sequence[MemoryRange], *, free: bool = False) -> None:
        self._sorted = sorted(
            (memory_range.address, memory_range.address + memory_range.size, n)
            for n, memory_range in enumerate(ranges)
            if (memory_range.kind == RangeKind.FREE) == free
        )
        self._starts = [start for start, _, _ in self._sorted]

    def places(self, address: int) -> list[Place]:
        """Return the places that this address can mean: inside a range, or one past the end of the range before."""
        found = []
        at = bisect_right(self._starts, address) - 1
        if at >= 0:
            start, stop, number = self._sorted[at]
            if address <= stop:
                found.append(Place(number, address - start))
            if address == start and at > 0 and self._sorted[at - 1][1] == address:
                found.append(Place(self._sorted[at - 1][2], address - self._sorted[at - 1][0]))
        return found
