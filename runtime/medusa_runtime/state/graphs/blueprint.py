"""Graph blueprints: the materialized CUDA graphs of one model on one GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

from .kernel_images import Image
from .structs import MEMCPY_POINTERS, MEMSET_POINTERS


class NodeKind(IntEnum):
    """The kinds of nodes that can be materialized, numbered as in CUgraphNodeType."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    EMPTY = 5


GRAPH_POOL = "graph pool"
"""The name of the graphs' memory pool if we chose its address. It is then one range, in every process."""


class RangeKind(IntEnum):
    NAMED = 0  # weights, KV cache, inputs, outputs: the engine that restores places it under this name
    SLAB = 1  # the graphs' own memory pool
    WORKSPACE = 2  # other live memory, such as cuBLAS' workspaces
    MODULE = 3  # a variable of a kernel image; its name is "<image>:<variable>"
    FREE = 4  # held by the allocator but not in use: an address in it is stale, and no kernel uses it


class MemoryRange(NamedTuple):
    """A range of device memory with a name. ``address`` is where it was when the graphs were captured."""

    name: str
    kind: RangeKind
    address: int
    size: int


class Piece(NamedTuple):
    """Bytes in device memory: an input of a reference replay, its output, or permanent contents.

    ``memory_range`` is the number of the range in ``Blueprints.ranges``.
    """

    memory_range: int
    offset: int
    data: bytes


class KernelRecord(NamedTuple):
    """A kernel, which is found again by its image and name.

    ``parameters`` has the (offset, size) of each one, in bytes. ``attributes`` are those of the function, as
    (CUfunction_attribute, value). ``image`` is the image's digest, or empty if it is not known; then the kernel can
    only be found by triggering.
    """

    name: str
    image: str
    parameters: tuple[tuple[int, int], ...]
    attributes: tuple[tuple[int, int], ...]


class Node(NamedTuple):
    """One operation of a graph.

    ``start`` and ``size`` are its bytes in the graph's blob: a kernel's parameters at their offsets, or the driver's
    structure of a memset or memcpy. ``attributes`` is the number of a set in ``Blueprints.attribute_sets``.
    """

    kind: int
    attributes: int
    kernel: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    start: int
    size: int


class Edge(NamedTuple):
    """A dependency between two nodes, which are given by their numbers.

    ``data`` is a CUgraphEdgeData: for which part of the source the target waits (in programmatic launches).
    """

    source: int
    target: int
    data: bytes


class Relocation(NamedTuple):
    """An address in a graph's blob, which a restore replaces.

    The eight bytes at ``position`` point ``offset`` bytes into the range with the number ``memory_range``. With ``map``
    they begin a tensor map instead, which contains the address.
    """

    position: int
    memory_range: int
    offset: int
    map: bool = False


@dataclass(frozen=True)
class GraphBlueprint:
    """One graph, with everything that is needed to build it again.

    ``key`` names the graph, such as by its batch size. The nodes, edges and relocations of a graph that was read from a
    file stay packed until a row of them is read (``tables.py``). ``pinned`` are the numbers of ranges that must be at
    their captured addresses, because not every address in the blob is known. ``inputs`` and ``outputs`` are those of a
    reference replay.
    """

    key: str
    nodes: Sequence[Node]
    edges: Sequence[Edge]
    blob: bytes
    relocations: Sequence[Relocation] = ()
    pinned: tuple[int, ...] = ()
    inputs: tuple[Piece, ...] = ()
    outputs: tuple[Piece, ...] = ()


AttributeSet = tuple[tuple[int, bytes], ...]


@dataclass(frozen=True)
class Blueprints:
    """All graphs of a model on a GPU.

    ``refused`` says, by key, why a graph could not be materialized. ``results`` has, by key, what else the engine needs
    to use a graph, as JSON in a form that only the engine knows. ``images`` are by their digests (SHA-256). Those of a
    file are checked when they are read, which raises StateError if one is damaged. ``contents`` are bytes that must be
    in memory before the first replay. ``host`` is set in a dump: the (start, stop) of the process's own memory, to
    which stale addresses may point.
    """

    fingerprint: dict[str, str] = field(default_factory=dict)
    ranges: tuple[MemoryRange, ...] = ()
    kernels: tuple[KernelRecord, ...] = ()
    attribute_sets: tuple[AttributeSet, ...] = ((),)
    graphs: tuple[GraphBlueprint, ...] = ()
    images: Mapping[str, Image] = field(default_factory=dict)
    contents: tuple[Piece, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    host: tuple[tuple[int, int], ...] = ()

    def graph(self, key: str) -> GraphBlueprint:
        return next(graph for graph in self.graphs if graph.key == key)

    def without(self, reasons: Mapping[str, str]) -> Blueprints:
        """Return the blueprints without the graphs with these keys, which are in ``refused`` then, with the reasons."""
        graphs = tuple(graph for graph in self.graphs if graph.key not in reasons)
        return replace(self, graphs=graphs, refused={**self.refused, **reasons})

    def words(self, node: Node) -> list[tuple[int, int]]:
        """Return the (start, stop) in the blob of each parameter of a node that can hold addresses."""
        if node.kind == NodeKind.KERNEL:
            parameters = self.kernels[node.kernel].parameters
            return [(node.start + offset, node.start + offset + size) for offset, size in parameters]
        fixed = {NodeKind.MEMSET: MEMSET_POINTERS, NodeKind.MEMCPY: MEMCPY_POINTERS}.get(NodeKind(node.kind), ())
        return [(node.start + offset, node.start + offset + 8) for offset in fixed]


__all__ = [
    "GRAPH_POOL",
    "AttributeSet",
    "Blueprints",
    "Edge",
    "GraphBlueprint",
    "KernelRecord",
    "MemoryRange",
    "Node",
    "NodeKind",
    "Piece",
    "RangeKind",
    "Relocation",
]
