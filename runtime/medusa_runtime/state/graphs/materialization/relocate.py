"""Find the bytes of a graph that are addresses, with the proof of a second capture with every memory range elsewhere.

One capture is not enough: a word that looks like an address need not be one, since structures that are passed by value
contain stale bytes of the stack. An address moves with its range, and a word that does not move is a constant.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..blueprint import GRAPH_POOL, Blueprints, GraphBlueprint, Node, NodeKind, RangeKind, Relocation
from ..mismatch import GraphMismatch, Reason
from ..tensor_map import MAP_BYTES, Replace, TensorMaps
from .memory_ranges import Place, RangeMap

# Where a process's stack, libraries and, if it is position-independent, its own code and heap are.
_HOST_ADDRESSES = (
    *(range(0x5500_0000_0000, 0x5700_0000_0000), range(0x7000_0000_0000, 0x8000_0000_0000)),  # x86-64
    *(range(0xAAAA_0000_0000, 0xAAAC_0000_0000), range(0xFF00_0000_0000, 0x1_0000_0000_0000)),  # arm64
)
_UNNAMED = (RangeKind.SLAB, RangeKind.WORKSPACE)
_NOT_PLACED = (RangeKind.MODULE, RangeKind.FREE)


class RelocationResult(NamedTuple):
    """The graphs with their relocations, and counts of their words.

    ``words`` counts words by kind: "pointer", "map" (a tensor map), "constant", "stale" (an address of the host, or of
    freed memory) and "opaque" (changed without an explanation). ``opaque`` counts, by kernel, the graphs that are
    pinned because of it.
    """

    blueprints: Blueprints
    words: Counter[str]
    opaque: Counter[str]


def find_relocations(
    first: Blueprints, second: Blueprints | None, replace_address: Replace = lambda data, address: None
) -> RelocationResult:
    """Add relocations to the graphs of ``first``.

    ``second`` has the same graphs, captured with the ranges elsewhere. Without it, or for a range that did not move,
    addresses are found but not proved, and the graph is pinned to the captured addresses. A graph is refused if its
    captures differ in another way. ``replace_address`` writes an address into a tensor map, as the driver does.
    """
    words: Counter[str] = Counter()
    opaque: Counter[str] = Counter()
    pairs, maps = _Pairs(first, second or first), TensorMaps(replace_address)
    graphs, refused = [], dict(first.refused)
    others = {graph.key: graph for graph in second.graphs} if second else {}
    for graph in first.graphs:
        if second is not None and graph.key not in others:
            refused[graph.key] = second.refused.get(graph.key, f"{Reason.NOT_DETERMINISTIC}: captured only once")
            continue
        try:
            comparison = _Comparison(first, second or first, graph, others.get(graph.key, graph), pairs, words, maps)
            graphs.append(comparison.run())
            opaque.update(comparison.opaque)
        except GraphMismatch as mismatch:
            refused[graph.key] = str(mismatch)
    return RelocationResult(replace(first, graphs=tuple(graphs), refused=refused), words, opaque)


class _Pairs:
    """The pairs of corresponding ranges in the two captures.

    Named ranges are matched by name, and so is the graphs' pool if it is one range. Torch's other allocations have no
    name that two processes share. For these, the first word that points to the same offset of two equally large ranges
    decides, and every later word must agree.
    """

    def __init__(self, first: Blueprints, second: Blueprints) -> None:
        self._ranges = first.ranges, second.ranges
        numbers = {
            memory_range.name: n
            for n, memory_range in enumerate(first.ranges)
            if memory_range.kind not in _UNNAMED or memory_range.name == GRAPH_POOL
        }
        self._second = {
            numbers[memory_range.name]: n
            for n, memory_range in enumerate(second.ranges)
            if memory_range.name in numbers
        }
        self._first = {two: one for one, two in self._second.items()}

    def same(self, one: Place, two: Place) -> bool:
        """Return whether two places are the same byte of the same range."""
        if one.offset != two.offset:
            return False
        if one.memory_range in self._second or two.memory_range in self._first:
            return self._second.get(one.memory_range) == two.memory_range
        a, b = self._ranges[0][one.memory_range], self._ranges[1][two.memory_range]
        if a.kind not in _UNNAMED or (a.kind, a.size) != (b.kind, b.size):
            return False
        self._second[one.memory_range], self._first[two.memory_range] = two.memory_range, one.memory_range
        return True

    def moved(self, memory_range: int) -> bool:
        """Return whether a range to which a word of the first capture points has another address in the second."""
        return self._ranges[0][memory_range].address != self._ranges[1][self._second[memory_range]].address


class _Comparison:
    """Compares the two captures of one graph word by word."""

    def __init__(
        self,
        first: Blueprints,
        second: Blueprints,
        a: GraphBlueprint,
        b: GraphBlueprint,
        pairs: _Pairs,
        words: Counter[str],
        tensor_maps: TensorMaps,
    ) -> None:
        self._dumps = first, second
        self._graphs = a, b
        self._maps = RangeMap(first.ranges), RangeMap(second.ranges)
        self._free = RangeMap(first.ranges, free=True), RangeMap(second.ranges, free=True)
        self._pairs = pairs
        self._lowest = min((one.address for one in (*first.ranges, *second.ranges)), default=0)
        addresses = {memory_range.address for memory_range in second.ranges}
        # Variables of kernel images are looked up by name at a restore, so they are never pinned.
        self._own = {n for n, memory_range in enumerate(first.ranges) if memory_range.kind not in _NOT_PLACED}
        # The ranges that hold everything a graph uses. Of torch's other memory, only ranges with a pointer come back.
        self._whole = {n for n in self._own if first.ranges[n].kind != RangeKind.WORKSPACE}
        self._unmoved = {n for n in self._own if first.ranges[n].address in addresses}
        self._pinned: set[int] = set()
        self._words = words
        self._tensor_maps = tensor_maps
        self.opaque: set[str] = set()

    def run(self) -> GraphBlueprint:
        a, b = self._graphs
        if len(a.nodes) != len(b.nodes) or a.edges != b.edges or len(a.blob) != len(b.blob):
            raise self._differ(f"{len(a.nodes)} and {len(b.nodes)} nodes, or their edges differ")
        relocations = []
        for number, (node, other) in enumerate(zip(a.nodes, b.nodes, strict=True)):
            if self._shape(0, node) != self._shape(1, other):
                raise self._differ(f"node {number} differs in its kernel, grid or attributes")
            for start, stop in self._dumps[0].words(node):
                found = self._parameter(number, node, start, stop)
                if not found and node.kind != NodeKind.KERNEL and not self._places(start)[0]:
                    raise GraphMismatch(Reason.FOREIGN_POINTER, f"node {number} is at no range's address")
                relocations += found
        if self.opaque:
            self._pinned.update(self._own & {relocation.memory_range for relocation in relocations})
        return replace(a, relocations=tuple(relocations), pinned=tuple(sorted(self._pinned)))

    def _parameter(self, number: int, node: Node, start: int, stop: int) -> list[Relocation]:
        if stop - start >= MAP_BYTES:  # if a range did not move, its address inside a tensor map did not change either
            self._pinned.update(self._unmoved)
        found: list[Relocation] = []
        behind = start  # the end of the last tensor map
        positions = range(start + -(start - node.start) % 8, stop - 7, 8)
        form = struct.Struct(f"<{len(positions)}Q")
        words = (form.unpack_from(graph.blob, positions.start) if positions else () for graph in self._graphs)
        for position, one, two in zip(positions, *words, strict=True):
            if one == two and one < self._lowest:  # most words; inside a tensor map as well
                self._words["constant"] += position >= behind
                continue
            if position < behind:
                continue
            place = self._word(position)
            if place is not None:
                found.append(Relocation(position, place.memory_range, place.offset))
            elif self._is_stale(position):
                self._words["stale"] += 1
            elif self._changed(position) or all(self._places(position)):
                first = max(start, behind, found[-1].position + 8 if found else start, position - MAP_BYTES + 8)
                last = min(position, stop - MAP_BYTES)
                relocation = self._map(range(first + -(first - node.start) % 8, last + 1, 8))
                if relocation is not None:
                    found.append(relocation)
                    behind = relocation.position + MAP_BYTES
                else:
                    self._unexplained(number, position)
        return found

    def _values(self, position: int) -> tuple[int, int]:
        one, two = (int.from_bytes(graph.blob[position : position + 8], "little") for graph in self._graphs)
        return one, two

    def _changed(self, position: int) -> bool:
        one, two = self._values(position)
        return one != two

    def _places(self, position: int) -> tuple[list[Place], list[Place]]:
        """Return what a word may point to, in each of the captures."""
        one, two = self._values(position)
        return self._maps[0].places(one), self._maps[1].places(two)

    def _map(self, starts: range) -> Relocation | None:
        """Return a tensor map with the same place in both captures, at the first of these positions that has one."""
        for start in starts:
            one, two = (graph.blob[start : start + MAP_BYTES] for graph in self._graphs)
            known = self._tensor_maps.addresses(one, two)
            common = self._common(*known) if known else []
            if common:
                self._words["map"] += 1
                return Relocation(start, common[0].memory_range, common[0].offset, map=True)
        return None

    def _common(self, one: int, two: int) -> list[Place]:
        """Return the places that an address of the first capture and one of the second have in common."""
        there = self._maps[1].places(two)
        return [place for place in self._maps[0].places(one) if any(self._pairs.same(place, other) for other in there)]

    def _shape(self, side: int, node: Node) -> tuple[object, ...]:
        dump = self._dumps[side]
        kernel = dump.kernels[node.kernel][0::2] if node.kernel >= 0 else None
        return kernel, dump.attribute_sets[node.attributes], (*node._replace(kernel=0, attributes=0),)

    def _word(self, position: int) -> Place | None:
        """Return the place to which a word points; None for a constant, and if the captures do not agree."""
        one, two = self._values(position)
        common = self._common(one, two)
        if common:
            place = common[0]
            if place.memory_range in self._own and not self._pairs.moved(place.memory_range):
                self._pinned.add(place.memory_range)
            self._words["pointer"] += 1
            return place
        if one == two and not all(self._places(position)):
            self._words["constant"] += 1
        return None

    def _is_stale(self, position: int) -> bool:
        """Return whether a word that changed is an address of the host, or of freed memory, in both captures."""
        words = self._values(position)
        return (
            words[0] != words[1]
            and not any(self._places(position))
            and all(
                _on_host(word, dump.host) or free.places(word)
                for word, dump, free in zip(words, self._dumps, self._free, strict=True)
            )
        )

    def _unexplained(self, number: int, position: int) -> None:
        """Count an opaque word, which did not change like an address. It pins the graph."""
        words, places = self._values(position), self._places(position)
        own = {place.memory_range for place in places[0]}
        if own - self._own or any(self._dumps[1].ranges[n].kind in _NOT_PLACED for n, _ in places[1]):
            raise self._differ(f"a parameter of node {number} points to {words[0]:#x}, and to {words[1]:#x}")
        # An address in an unknown form, an old one, or meaningless bytes: all are right at the captured addresses.
        self._words["opaque"] += 1
        self._pinned.update(self._whole, own)
        kernel = self._graphs[0].nodes[number].kernel
        self.opaque.add(self._dumps[0].kernels[kernel].name if kernel >= 0 else f"node {number}")

    def _differ(self, detail: str) -> GraphMismatch:
        return GraphMismatch(Reason.NOT_DETERMINISTIC, f"two captures differ: {detail}")


def _on_host(word: int, own: Sequence[tuple[int, int]]) -> bool:
    """Return whether a word is an address of the host: in a usual place, or in the process's own memory (``own``).

    If a process is not position-independent, its heap has small addresses, so only aligned words count there.
    """
    if any(word in host for host in _HOST_ADDRESSES):
        return True
    return word % 8 == 0 and any(start <= word < stop for start, stop in own)
