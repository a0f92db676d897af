"""Find the memory contents that a graph needs but does not write itself (MEDUSA §4.3), by poisoning.

Workspaces and the graphs' pool are mostly scratch memory. To find the parts that are not, they are overwritten. If a
replay's outputs change, something was written there before the graphs were captured, and restored graphs need the same
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..blueprint import Blueprints, GraphBlueprint, Piece, RangeKind
from ..mismatch import GraphMismatch, Reason
from ..replay import Launch, Replayer

_POISON = 0xFF  # NaN in every float format, -1 in every integer one
_SCRATCH = (RangeKind.SLAB, RangeKind.WORKSPACE)
_REPLAYS = 2  # a graph that resets its workspace may be right the first time and wrong the second


def permanent_contents(blueprints: Blueprints, launches: Mapping[str, Launch], replayer: Replayer) -> tuple[Piece, ...]:
    """Return the bytes that must be in workspaces and pool before the first replay. Memory is left as it was.

    ``launches`` has, by key, functions that replay the graphs with reference inputs and outputs. Raises GraphMismatch
    (CONTENTS) if the outputs differ even with all bytes in place that were found to matter.
    """
    kept = _pieces(blueprints)
    saved = replayer.read(kept)
    needed: set[int] = set()
    try:
        launched = [graph for graph in blueprints.graphs if graph.key in launches]
        for graph in launched:
            unknown = [number for number in range(len(saved)) if number not in needed]
            needed |= _needed(graph, launches[graph.key], replayer, saved, unknown)
        scratch = [piece for number, piece in enumerate(saved) if number not in needed]
        contents = tuple(piece for number, piece in enumerate(saved) if number in needed)
        for graph in launched:
            if not _is_correct(graph, launches[graph.key], replayer, saved, scratch):
                raise GraphMismatch(Reason.CONTENTS, f"{graph.key} reads memory that no pointer of it leads to")
    finally:
        replayer.write(saved)
    return contents


def _needed(
    graph: GraphBlueprint, launch: Launch, replayer: Replayer, saved: Sequence[Piece], unknown: Sequence[int]
) -> set[int]:
    """Return the numbers of the pieces that this graph needs, of those of which it is ``unknown``.

    Pieces that can be poisoned together without an effect are not needed. Otherwise, each half of them is tried.
    """
    found: set[int] = set()
    waiting = [unknown]
    while waiting:
        tried = waiting.pop()
        if not tried or _is_correct(graph, launch, replayer, saved, [saved[number] for number in tried]):
            continue
        if len(tried) == 1:
            found.add(tried[0])
        else:
            half = len(tried) // 2
            waiting += [tried[:half], tried[half:]]
    return found


def _is_correct(
    graph: GraphBlueprint, launch: Launch, replayer: Replayer, saved: Sequence[Piece], poisoned: Sequence[Piece]
) -> bool:
    """Return whether a replay gives the reference outputs with these pieces overwritten."""
    overwritten = {(piece.memory_range, piece.offset) for piece in poisoned}
    # The pool may have gigabytes, so pieces that are about to be poisoned are not written first.
    replayer.write(piece for piece in saved if (piece.memory_range, piece.offset) not in overwritten)
    for piece in poisoned:
        replayer.fill(piece, _POISON)
    return all(replayer.run(launch, graph.inputs, graph.outputs) == graph.outputs for _ in range(_REPLAYS))


def _pieces(blueprints: Blueprints) -> tuple[Piece, ...]:
    """Return workspaces and pool, cut where pointers point. Each piece belongs to the pointer to its start.

    If a graph pins a range, not all pointers into it are known, so the bytes before the first one are a piece, too.
    """
    cuts: dict[int, set[int]] = {}
    reference = {
        (piece.memory_range, piece.offset) for graph in blueprints.graphs for piece in (*graph.inputs, *graph.outputs)
    }
    for graph in blueprints.graphs:
        for relocation in graph.relocations:
            if blueprints.ranges[relocation.memory_range].kind in _SCRATCH:
                cuts.setdefault(relocation.memory_range, set()).add(relocation.offset)
        for memory_range in graph.pinned:
            if blueprints.ranges[memory_range].kind in _SCRATCH:
                cuts.setdefault(memory_range, set()).add(0)
    pieces = []
    for memory_range, offsets in cuts.items():
        ends = sorted({*offsets, blueprints.ranges[memory_range].size})
        for start, stop in pairwise(ends):
            if (memory_range, start) not in reference:
                pieces.append(Piece(memory_range, start, bytes(stop - start)))
    return tuple(pieces)
