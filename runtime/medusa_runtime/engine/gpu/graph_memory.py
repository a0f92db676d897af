"""Device memory that graphs point into and that nobody has named: what torch has allocated for itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...state.graphs.blueprint import MemoryRange, RangeKind

Segments = Iterable[Mapping[str, Any]]


def other_ranges(named: Iterable[MemoryRange], segments: Segments, pool: tuple[int, int]) -> list[MemoryRange]:
    """What torch has allocated besides: the graphs' pool, live blocks that have no name (workspaces of cuBLAS), and
    what it holds though nobody has it: parameters passed by value carry old bytes, and so addresses of what was there.

    ``segments``: torch.cuda.memory_snapshot's. They are called after their sizes, and a number where these are equal.
    Another process may have others before them: which is which there, two captures tell (``relocate.py``).
    """
    known = sorted((memory_range.address, memory_range.address + memory_range.size) for memory_range in named)
    counts: Counter[tuple[RangeKind, int]] = Counter()
    found = []
    for kind, address, size in sorted(_blocks(segments, tuple(pool)), key=lambda block: (block[0], block[2], block[1])):
        if any(start < address + size and address < stop for start, stop in known):
            continue
        found.append(MemoryRange(f"{kind.name.lower()} {size} {counts[kind, size]}", kind, address, size))
        counts[kind, size] += 1
    return found


def _blocks(segments: Segments, pool: tuple[int, ...]) -> Iterator[tuple[RangeKind, int, int]]:
    for segment in segments:
        if tuple(segment.get("segment_pool_id", (0, 0))) == pool:
            yield RangeKind.SLAB, int(segment["address"]), int(segment["total_size"])
        else:
            for block in segment["blocks"]:
                used = block["state"] == "active_allocated"
                yield RangeKind.WORKSPACE if used else RangeKind.FREE, int(block["address"]), int(block["size"])


__all__ = ["Segments", "other_ranges"]
