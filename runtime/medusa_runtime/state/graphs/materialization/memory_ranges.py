"""From an address to (region, offset)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from ..blueprint import MemoryRange, RangeKind


class Place(NamedTuple):
    region: int
    offset: int


class RangeMap:
    """Looks addresses up in regions that do not overlap: in those that are in use, or in the others (``free``)."""

    def __init__(self, regions: Sequence[MemoryRange], *, free: bool = False) -> None:
        self._sorted = sorted(
            (region.address, region.address + region.size, n)
            for n, region in enumerate(regions)
            if (region.kind == RangeKind.FREE) == free
        )
        self._starts = [start for start, _, _ in self._sorted]

    def places(self, address: int) -> list[Place]:
        """Where this address can be meant: inside a region, or one past the end of the one before."""
        found = []
        at = bisect_right(self._starts, address) - 1
        if at >= 0:
            start, stop, number = self._sorted[at]
            if address <= stop:
                found.append(Place(number, address - start))
            if address == start and at > 0 and self._sorted[at - 1][1] == address:
                found.append(Place(self._sorted[at - 1][2], address - self._sorted[at - 1][0]))
        return found
