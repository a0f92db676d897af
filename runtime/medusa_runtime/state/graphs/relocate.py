"""Which bytes of a graph are addresses: proved by two captures with every region elsewhere.

A word that looks like an address need not be one: structures passed by value carry stale bytes of the stack, so that no
look at one capture is safe. What is an address moves with its region; what does not move is a constant.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from .blueprint import Blueprints, GraphBlueprint, Node, NodeKind, RegionKind, Relocation
from .mismatch import MismatchError, Reason
from .regions import Place, RegionMap
from .tensor_map import MAP_BYTES, Replace, addresses

_HOST_ADDRESSES = (
    *(range(0x5500_0000_0000, 0x5700_0000_0000), range(0x7000_0000_0000, 0x8000_0000_0000)),  # x86-64
    *(range(0xAAAA_0000_0000, 0xAAAC_0000_0000), range(0xFF00_0000_0000, 0x1_0000_0000_0000)),  # arm64
)


class Proof(NamedTuple):
    """``words``: how many were "pointer", "map" (a tensor map), "constant", "stale" (host addresses) or "opaque"
    (changed, unexplained). ``opaque``: kernel → how many graphs it pins with such words."""

    blueprints: Blueprints
    words: Counter[str]
    opaque: Counter[str]


def prove(first: Blueprints, second: Blueprints | None, replace_address: Replace = lambda data, address: None) -> Proof:
    """``first`` with relocations. ``second``: the same graphs captured with the regions of the same names elsewhere.

    Without a second dump, or for a region that did not move, addresses are found but not proved: such a graph is pinned
    to the captured addresses. A graph whose captures differ otherwise is refused. ``replace_address``: the
    driver's, for tensor maps.
    """
    words: Counter[str] = Counter()
    opaque: Counter[str] = Counter()
    graphs, refused = [], dict(first.refused)
    others = {graph.key: graph for graph in second.graphs} if second else {}
    for graph in first.graphs:
        if second is not None and graph.key not in others:
            refused[graph.key] = second.refused.get(graph.key, f"{Reason.NOT_DETERMINISTIC}: captured only once")
            continue
        try:
            comparison = _Comparison(
                first, second or first, graph, others.get(graph.key, graph), words, replace_address
            )
            graphs.append(comparison.run())
            opaque.update(comparison.opaque)
        except MismatchError as mismatch:
            refused[graph.key] = str(mismatch)
    return Proof(replace(first, graphs=tuple(graphs), refused=refused), words, opaque)


class _Comparison:
    def __init__(
        self,
        first: Blueprints,
        second: Blueprints,
        a: GraphBlueprint,
        b: GraphBlueprint,
        words: Counter[str],
        replace_address: Replace,
    ) -> None:
        self._dumps = first, second
        self._graphs = a, b
        self._maps = RegionMap(first.regions), RegionMap(second.regions)
        numbers = {region.name: n for n, region in enumerate(first.regions)}
        self._renumber = {n: numbers.get(region.name, -1) for n, region in enumerate(second.regions)}
        addresses = {region.name: region.address for region in second.regions}
        # A variable of a kernel image is asked for by name when restored: it is never where it was.
        self._own = {n for n, region in enumerate(first.regions) if region.kind != RegionKind.MODULE}
        self._unmoved = {n for n in self._own if addresses.get(first.regions[n].name) == first.regions[n].address}
        self._pinned: set[int] = set()
        self._words = words
        self._replace = replace_address
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
                if not found and node.kind != NodeKind.KERNEL:
                    raise MismatchError(Reason.FOREIGN_POINTER, f"node {number} is at no region's address")
                relocations += found
        return replace(a, relocations=tuple(relocations), pinned=tuple(sorted(self._pinned)))

    def _parameter(self, number: int, node: Node, start: int, stop: int) -> list[Relocation]:
        if stop - start >= MAP_BYTES:  # an address inside a map stays, too, where its region did
            self._pinned.update(self._unmoved)
        found: list[Relocation] = []
        behind = start  # of a tensor map
        for position in range(start + -(start - node.start) % 8, stop - 7, 8):
            if position < behind:
                continue
            place = self._word(number, position)
            if place is not None:
                found.append(Relocation(position, place.region, place.offset))
            elif self._changed(position):
                first = max(start, behind, found[-1].position + 8 if found else start)
                relocation = self._map(range(first + -(first - node.start) % 8, stop - MAP_BYTES + 1, 8), position)
                if relocation is not None:
                    found.append(relocation)
                    behind = relocation.position + MAP_BYTES
                else:
                    self._unexplained(number, position)
        return found

    def _changed(self, position: int) -> bool:
        one, two = (graph.blob[position : position + 8] for graph in self._graphs)
        return one != two

    def _map(self, starts: range, position: int) -> Relocation | None:
        """A tensor map around this word, with the same place in both captures."""
        for start in starts:
            if not start <= position < start + MAP_BYTES:
                continue
            one, two = (graph.blob[start : start + MAP_BYTES] for graph in self._graphs)
            known = addresses(one, two, self._replace)
            common = self._common(*known) if known else []
            if common:
                self._words["map"] += 1
                if common[0].region in self._unmoved:
                    self._pinned.add(common[0].region)
                return Relocation(start, common[0].region, common[0].offset, map=True)
        return None

    def _common(self, one: int, two: int) -> list[Place]:
        """Where an address of the first capture and one of the second are at the same place."""
        there = [place._replace(region=self._renumber[place.region]) for place in self._maps[1].places(two)]
        return [place for place in self._maps[0].places(one) if place in there]

    def _shape(self, side: int, node: Node) -> tuple[object, ...]:
        dump = self._dumps[side]
        kernel = dump.kernels[node.kernel][0::2] if node.kernel >= 0 else None
        return kernel, dump.attribute_sets[node.attributes], (*node._replace(kernel=0, attributes=0),)

    def _word(self, number: int, position: int) -> Place | None:
        one, two = (int.from_bytes(graph.blob[position : position + 8], "little") for graph in self._graphs)
        common = self._common(one, two)
        if common:
            place = common[0]
            if place.region in self._unmoved:
                self._pinned.add(place.region)
            self._words["pointer"] += 1
            return place
        if one == two:
            self._words["constant"] += 1
            return None
        if self._maps[0].places(one) or self._maps[1].places(two):
            raise self._differ(f"a parameter of node {number} points to {one:#x} once and to {two:#x} then")
        return None

    def _unexplained(self, number: int, position: int) -> None:
        """A word that changed, and is no address as such."""
        one, two = (int.from_bytes(graph.blob[position : position + 8], "little") for graph in self._graphs)
        if all(any(word in host for host in _HOST_ADDRESSES) for word in (one, two)):
            self._words["stale"] += 1
            return
        # An address in a form that nobody knows, or nothing: at the captured addresses both are right.
        self._words["opaque"] += 1
        self._pinned.update(self._own)
        kernel = self._graphs[0].nodes[number].kernel
        self.opaque.add(self._dumps[0].kernels[kernel].name if kernel >= 0 else f"node {number}")

    def _differ(self, detail: str) -> MismatchError:
        return MismatchError(Reason.NOT_DETERMINISTIC, f"two captures differ: {detail}")
