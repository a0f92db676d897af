"""Which allocation a pointer was of (MEDUSA §4.1): the indirect index pointers.

Addresses are used again, so a pointer's value alone names several allocations (the paper's figure 6). A kernel only
uses what is allocated when it is launched: looking back from the launch, over what was not released, there is one.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..blueprint import TraceEvent


class Index(NamedTuple):
    """The ``allocation``-th allocation of the trace, and how far into it."""

    allocation: int
    offset: int


class _Launch(NamedTuple):
    graph: str
    node: int


class AllocationTrace:
    """Allocations, releases and captured launches, in the order in which they happened."""

    def __init__(self) -> None:
        self._events: list[TraceEvent | _Launch] = []
        self._live: dict[int, int] = {}  # address → number
        self._count = 0
        self._nodes: defaultdict[str, int] = defaultdict(int)

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

    def launch(self, graph: str, count: int = 1) -> None:
        """The next ``count`` nodes of a graph were captured."""
        for _ in range(count):
            self._events.append(_Launch(graph, self._nodes[graph]))
            self._nodes[graph] += 1

    def launched(self, graph: str, nodes: int) -> None:
        """The graph has ``nodes`` nodes by now: for a recorder that looks at the graph at each allocation."""
        self.launch(graph, nodes - self._nodes[graph])

    @property
    def events(self) -> tuple[TraceEvent, ...]:
        """Allocations and releases only: what an online phase replays (MEDUSA §4.2)."""
        return tuple(event for event in self._events if isinstance(event, TraceEvent))

    def indices(self, pointers: Mapping[tuple[str, int], Iterable[int]]) -> dict[tuple[str, int, int], Index]:
        """(graph, node) → pointers, to (graph, node, pointer) → index. What is in no live allocation is left out."""
        found: dict[tuple[str, int, int], Index] = {}
        starts: list[int] = []
        live: dict[int, tuple[int, int]] = {}  # start → size, number
        started: list[int] = []
        for event in self._events:
            if isinstance(event, _Launch):
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
