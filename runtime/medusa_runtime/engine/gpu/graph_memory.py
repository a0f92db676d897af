"""Finds the unnamed device memory that graphs may point into: what torch has allocated for itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...errors import EngineError
from ...state.graphs.blueprint import MemoryRange, RangeKind

Segments = Iterable[Mapping[str, Any]]


def unnamed_ranges(named: Iterable[MemoryRange], segments: Segments, pool: tuple[int, int]) -> list[MemoryRange]:
    """Return all memory that torch has allocated beyond the named ranges.

    That is the graphs' pool, live blocks (such as cuBLAS's workspaces), and cached blocks that are not in use. The last
    count too, because kernel parameters that are passed by value can contain stale bytes, and so addresses of earlier
    blocks.

    ``segments`` come from ``torch.cuda.memory_snapshot``. A range is named after its kind and size, with a number,
    since several can have the same size. Another process may number them differently; comparing two captures
    (``relocate.py``) shows which range is which.

    Raises EngineError for expandable segments, because they grow and shrink while graphs use them.
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


__all__ = ["Segments", "unnamed_ranges"]
