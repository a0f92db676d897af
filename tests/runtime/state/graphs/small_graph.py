"""A graph with every kind of node, edge, attribute and relocation."""

from __future__ import annotations

from medusa_runtime.state.graphs import Blueprints, MemoryRange, RangeKind
from medusa_runtime.state.graphs.blueprint import Edge, GraphBlueprint, KernelRecord, Node, Relocation

PLAIN, PROGRAMMATIC = bytes(8), bytes([1, 0, 1, 0, 0, 0, 0, 0])
PRIORITY, SERIALIZED = (8, bytes([254, 255, 255, 255]).ljust(64, b"\0")), (6, b"\1".ljust(64, b"\0"))
GRAPH = GraphBlueprint(
    "decode-1",
    (
        Node(0, 1, 0, (2, 3, 4), (5, 6, 7), 8, 3, 16),
        Node(2, 0, -1, (0, 0, 0), (0, 0, 0), 0, 20, 40),
        Node(1, 0, -1, (0, 0, 0), (0, 0, 0), 0, 61, 200),
        Node(5, 0, -1, (0, 0, 0), (0, 0, 0), 0, 0, 0),
        Node(0, 2, 1, (1, 1, 1), (32, 1, 1), 0, 264, 128),
        Node(0, 0, 2, (1, 1, 1), (32, 1, 1), 0, 392, 0),
    ),
    (Edge(0, 1, PLAIN), Edge(1, 2, PROGRAMMATIC), Edge(2, 3, PLAIN), Edge(2, 4, PROGRAMMATIC), Edge(3, 5, PLAIN)),
    bytes(number % 251 for number in range(392)),
    (Relocation(3, 0, 24), Relocation(20, 1, 4096), Relocation(264, 0, 64, map=True), Relocation(109, 2, 0)),
)
WHOLE = Blueprints(
    ranges=tuple(MemoryRange(name, RangeKind.NAMED, (n + 1) << 40, 4096) for n, name in enumerate("abc")),
    kernels=(
        KernelRecord("scale", "", ((0, 8), (8, 4), (12, 4)), ()),
        KernelRecord("tiled", "", ((0, 128),), ()),
        KernelRecord("nothing", "", (), ()),
    ),
    attribute_sets=((), (PRIORITY,), (SERIALIZED,)),
    graphs=(GRAPH,),
)
