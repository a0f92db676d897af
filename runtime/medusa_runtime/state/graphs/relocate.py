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

_HOST_ADDRESSES = (
    *(range(0x5500_0000_0000, 0x5700_0000_0000), range(0x7000_0000_0000, 0x8000_0000_0000)),  # x86-64
    *(range(0xAAAA_0000_0000, 0xAAAC_0000_0000), range(0xFF00_0000_0000, 0x1_0000_0000_0000)),  # arm64
)


class Proof(NamedTuple):
    """``words``: how many were "pointer", "constant", "stale" (host addresses) or "opaque" (changed, unexplained)."""

    blueprints: Blueprints
    words: Counter[str]


def prove(first: Blueprints, second: Blueprints | None) -> Proof:
    """``first`` with relocations. ``second``: the same graphs captured with the regions of the same names elsewhere.

    Without a second dump, or for a region that did not move, addresses are found but not proved: such a graph is pinned
    to the captured addresses. A graph whose captures differ otherwise is refused.
    """
    words: Counter[str] = Counter()
    graphs, refused = [], dict(first.refused)
    others = {graph.key: graph for graph in second.graphs} if second else {}
    for graph in first.graphs:
        try:
            if second is None:
                graphs.append(_Comparison(first, first, graph, graph, words).run())
            elif graph.key in others:
                graphs.append(_Comparison(first, second, graph, others[graph.key], words).run())
            else:
                refused[graph.key] = second.refused.get(graph.key, f"{Reason.NOT_DETERMINISTIC}: captured only once")
        except MismatchError as mismatch:
            refused[graph.key] = str(mismatch)
    return Proof(replace(first, graphs=tuple(graphs), refused=refused), words)


class _Comparison:
    def __init__(
        self, first: Blueprints, second: Blueprints, a: GraphBlueprint, b: GraphBlueprint, words: Counter[str]
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

    def run(self) -> GraphBlueprint:
        a, b = self._graphs
        if len(a.nodes) != len(b.nodes) or a.edges != b.edges or len(a.blob) != len(b.blob):
            raise self._differ(f"{len(a.nodes)} and {len(b.nodes)} nodes, or their edges differ")
        relocations = []
        for number, (node, other) in enumerate(zip(a.nodes, b.nodes, strict=True)):
            if self._shape(0, node) != self._shape(1, other):
                raise self._differ(f"node {number} differs in its kernel, grid or attributes")
            for start, stop in self._dumps[0].words(node):
                for position in range(start + -(start - node.start) % 8, stop - 7, 8):
                    place = self._word(number, position)
                    if place is None and node.kind != NodeKind.KERNEL:
                        raise MismatchError(Reason.FOREIGN_POINTER, f"node {number} is at no region's address")
                    if place is not None:
                        relocations.append(Relocation(position, place.region, place.offset))
        return replace(a, relocations=tuple(relocations), pinned=tuple(sorted(self._pinned)))

    def _shape(self, side: int, node: Node) -> tuple[object, ...]:
        dump = self._dumps[side]
        kernel = dump.kernels[node.kernel][0::2] if node.kernel >= 0 else None
        return kernel, dump.attribute_sets[node.attributes], (*node._replace(kernel=0, attributes=0),)

    def _word(self, number: int, position: int) -> Place | None:
        one, two = (int.from_bytes(graph.blob[position : position + 8], "little") for graph in self._graphs)
        here = self._maps[0].places(one)
        there = [place._replace(region=self._renumber[place.region]) for place in self._maps[1].places(two)]
        common = [place for place in here if place in there]
        if common:
            place = common[0]
            if place.region in self._unmoved:
                self._pinned.add(place.region)
            self._words["pointer"] += 1
            return place
        if one == two:
            self._words["constant"] += 1
            return None
        if here or there:
            raise self._differ(f"a parameter of node {number} points to {one:#x} once and to {two:#x} then")
        if all(any(word in host for host in _HOST_ADDRESSES) for word in (one, two)):
            self._words["stale"] += 1
            return None
        # An address in a form of its own (a tensor map), or nothing: at the captured addresses both are right.
        self._words["opaque"] += 1
        self._pinned.update(self._own)
        return None

    def _differ(self, detail: str) -> MismatchError:
        return MismatchError(Reason.NOT_DETERMINISTIC, f"two captures differ: {detail}")
