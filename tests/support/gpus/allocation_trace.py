"""The paper's way to address memory, as an oracle for ours: pointers by allocation, and allocations made again.

A pointer is the number of an allocation and an offset into it (the indirect index pointer of MEDUSA §4.1). A start
repeats all allocations and releases, and takes the addresses that they return (§4.2). Addresses are used again, so a
pointer's value alone names several allocations (the paper's figure 6). A kernel only uses what is allocated when it is
launched: looking back from the launch, over what was not released, there is one.
"""

from __future__ import annotations

import json
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from medusa_runtime.state.graphs import Blueprints, MemoryRange, RangeKind
from medusa_runtime.state.graphs.blueprint import GraphBlueprint


class Index(NamedTuple):
    """The ``allocation``-th allocation of the trace, and how far into it."""

    allocation: int
    offset: int


class TraceEvent(NamedTuple):
    """An allocation (``size`` > 0, numbered in order) or the release of one (``size`` 0, ``address`` its number)."""

    address: int
    size: int


class Launch(NamedTuple):
    """The capture of a graph's next node."""

    graph: str
    node: int


class AllocationTrace:
    """Allocations, releases and captured launches, in the order in which they happened."""

    def __init__(self) -> None:
        self._events: list[TraceEvent | Launch] = []
        self._live: dict[int, int] = {}  # address → number
        self._count = 0
        self._nodes: defaultdict[str, int] = defaultdict(int)

    @classmethod
    def load(cls, path: Path) -> AllocationTrace:
        """Read what ``save`` wrote."""
        trace = cls()
        pairs = json.loads(path.read_text())
        trace._events = [Launch(*pair) if isinstance(pair[0], str) else TraceEvent(*pair) for pair in pairs]
        return trace

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self._events))

    def malloc(self, address: int, size: int) -> None:
        """``size`` in bytes; one of zero bytes returns nothing that could be pointed to, and is left out."""
        if size > 0:
            self._live[address] = self._count
            self._count += 1
            self._events.append(TraceEvent(address, size))

    def free(self, address: int) -> None:
        """What was allocated before the trace began may be released too: it has no number."""
        number = self._live.pop(address, None)
        if number is not None:
            self._events.append(TraceEvent(number, 0))

    def launch(self, graph: str) -> None:
        self._events.append(Launch(graph, self._nodes[graph]))
        self._nodes[graph] += 1

    @property
    def events(self) -> tuple[TraceEvent, ...]:
        """Allocations and releases only."""
        return tuple(event for event in self._events if isinstance(event, TraceEvent))

    def indices(self, pointers: Mapping[tuple[str, int], Iterable[int]]) -> dict[tuple[str, int, int], Index]:
        """(graph, node) → pointers, to (graph, node, pointer) → index. What is in no live allocation is left out."""
        found: dict[tuple[str, int, int], Index] = {}
        starts: list[int] = []
        live: dict[int, tuple[int, int]] = {}  # start → size, number
        started: list[int] = []
        for event in self._events:
            if isinstance(event, Launch):
                for pointer in pointers.get(event, ()):
                    at = bisect_right(starts, pointer) - 1
                    if at >= 0 and pointer < starts[at] + live[starts[at]][0]:
                        found[event.graph, event.node, pointer] = Index(live[starts[at]][1], pointer - starts[at])
            elif event.size:
                if event.address not in live:
                    insort(starts, event.address)
                live[event.address] = (event.size, len(started))
                started.append(event.address)
            else:
                address = started[event.address]
                if address in live and live[address][1] == event.address:
                    del live[address]
                    starts.pop(bisect_right(starts, address) - 1)
        return found


def by_allocation(blueprints: Blueprints, trace: AllocationTrace, *, first_match: bool = False) -> Blueprints:
    """The same graphs, with each pointer into a traced allocation relative to that allocation.

    ``first_match``: take the first allocation that ever returned that address, which is the mistake of figure 6.
    """
    allocations = [event for event in trace.events if event.size]
    first: dict[int, int] = {}
    for number, event in enumerate(allocations):
        first.setdefault(event.address, number)
    wanted: dict[tuple[str, int], set[int]] = defaultdict(set)
    for graph in blueprints.graphs:
        for node, pointer in _pointers(blueprints, graph).values():
            wanted[graph.key, node].add(pointer)
    indices = trace.indices(wanted)
    graphs = []
    for graph in blueprints.graphs:
        pointers = _pointers(blueprints, graph)
        relocations = []
        for relocation in graph.relocations:
            index = indices.get((graph.key, *pointers[relocation.position]))
            if index is not None:
                number = first[allocations[index.allocation].address] if first_match else index.allocation
                relocation = relocation._replace(memory_range=len(blueprints.ranges) + number, offset=index.offset)
            relocations.append(relocation)
        graphs.append(replace(graph, relocations=tuple(relocations)))
    ranges = [MemoryRange(_name(number), RangeKind.SLAB, *event) for number, event in enumerate(allocations)]
    return replace(blueprints, graphs=tuple(graphs), ranges=(*blueprints.ranges, *ranges))


def replay(events: Iterable[TraceEvent], malloc: Callable[[int], int], free: Callable[[int], None]) -> dict[str, int]:
    """Make the allocations again with another allocator: the name of each one's range → its address."""
    addresses: list[int] = []
    for event in events:
        if event.size:
            addresses.append(malloc(event.size))
        else:
            free(addresses[event.address])
    return {_name(number): address for number, address in enumerate(addresses)}


def _name(allocation: int) -> str:
    return f"allocation {allocation}"


def _pointers(blueprints: Blueprints, graph: GraphBlueprint) -> dict[int, tuple[int, int]]:
    """Position in the blob → node and captured address."""
    addresses = {r.position: blueprints.ranges[r.memory_range].address + r.offset for r in graph.relocations}
    return {
        position: (number, addresses[position])
        for number, node in enumerate(graph.nodes)
        for start, stop in blueprints.words(node)
        for position in range(start, stop)
        if position in addresses
    }
