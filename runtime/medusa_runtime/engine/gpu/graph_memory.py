"""Finds the device memory that graphs point into and that has no name: what torch has allocated for itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...errors import EngineError
from ...state.graphs.blueprint import MemoryRange, RangeKind

Segments = Iterable[Mapping[str, Any]]


def other_ranges(named: Iterable[MemoryRange], segments: Segments, pool: tuple[int, int]) -> list[MemoryRange]:
    """Everything that torch has allocated beyond the named ranges.

    That is the graphs' pool, live blocks (such as cuBLAS' workspaces), and cached blocks that are not in use:
    parameters that are passed by value contain old bytes, and so addresses of what was there before.

    Expandable segments are no fixed places: one grows, and shrinks, while its graphs live. Raises EngineError for them.

    ``segments``: from torch.cuda.memory_snapshot. The ranges are named after their sizes, with a number where sizes are
    equal. Another process may count other ranges before them; comparing two captures (``relocate.py``) shows which is
    which.
    """
    segments = list(segments)
    if any(segment.get("is_expandable") for segment in segments):
        raise EngineError(
            "expected torch's allocator without expandable segments, found some, which captured graphs cannot be "
            "materialized with; take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF"
        )
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
