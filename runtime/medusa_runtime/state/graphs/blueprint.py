"""A materialized CUDA graph, and all of one model's for one GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from .structs import MEMCPY_POINTERS, MEMSET_POINTERS


class NodeKind(IntEnum):
    """CUgraphNodeType, of those that can be materialized."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    EMPTY = 5


class RangeKind(IntEnum):
    NAMED = 0  # weights, KV cache, inputs, outputs: whoever restores has placed it under this name
    SLAB = 1  # the graphs' own memory pool
    WORKSPACE = 2  # other live memory, as of cuBLAS
    MODULE = 3  # a variable of a kernel image; its name is "<image>:<variable>"
    FREE = 4  # the allocator's, and given to nobody: an address in it is a stale one, which no kernel follows


class MemoryRange(NamedTuple):
    """A range of device memory with a name; ``address`` is where it was when captured."""

    name: str
    kind: RangeKind
    address: int
    size: int


class Piece(NamedTuple):
    """Bytes at a place: an input of a reference replay, its output, or permanent contents."""

    memory_range: int
    offset: int
    data: bytes


class KernelRecord(NamedTuple):
    """A kernel: found again by (image, name). ``parameters``: (offset, size) of each; ``attributes``: of the function,
    by CUfunction_attribute. ``image`` is empty where it is not known: then only a trigger finds the kernel."""

    name: str
    image: str
    parameters: tuple[tuple[int, int], ...]
    attributes: tuple[tuple[int, int], ...]


class Node(NamedTuple):
    """``start``, ``size``: its bytes in the graph's blob, which are a kernel's parameters at their offsets, or the
    driver's structure of a memset or memcpy. ``attributes``: number of a set in ``Blueprints.attribute_sets``."""

    kind: int
    attributes: int
    kernel: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    start: int
    size: int


class Edge(NamedTuple):
    """``data`` is CUgraphEdgeData: what of the source the target waits for (programmatic launches)."""

    source: int
    target: int
    data: bytes


class Relocation(NamedTuple):
    """The eight bytes at ``position`` of the blob are an address: ``offset`` into the range of this number. ``map``: a
    tensor map begins there instead, with the address inside."""

    position: int
    memory_range: int
    offset: int
    map: bool = False


@dataclass(frozen=True)
class GraphBlueprint:
    """``pinned``: ranges that must lie at their captured addresses, because not every address in the blob is known."""

    key: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    blob: bytes
    relocations: tuple[Relocation, ...] = ()
    pinned: tuple[int, ...] = ()
    inputs: tuple[Piece, ...] = ()
    outputs: tuple[Piece, ...] = ()


AttributeSet = tuple[tuple[int, bytes], ...]


@dataclass(frozen=True)
class Blueprints:
    """All graphs of a model on a GPU. ``refused``: key → why that graph could not be materialized. ``results``: key →
    what else its engine needs to use it, as JSON; see there."""

    fingerprint: dict[str, str] = field(default_factory=dict)
    ranges: tuple[MemoryRange, ...] = ()
    kernels: tuple[KernelRecord, ...] = ()
    attribute_sets: tuple[AttributeSet, ...] = ((),)
    graphs: tuple[GraphBlueprint, ...] = ()
    images: dict[str, bytes] = field(default_factory=dict)
    contents: tuple[Piece, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        from .blob_format import encode

        path.write_bytes(encode(self))

    @classmethod
    def load(cls, data: bytes) -> Blueprints:
        """StateError when the bytes are damaged, cut, or of another version."""
        from .blob_format import decode

        return decode(data)

    def graph(self, key: str) -> GraphBlueprint:
        return next(graph for graph in self.graphs if graph.key == key)

    def used_ranges(self) -> set[int]:
        """Those that any graph points into, or must find where they were."""
        pinned = {number for graph in self.graphs for number in graph.pinned}
        return pinned | {relocation.memory_range for graph in self.graphs for relocation in graph.relocations}

    def words(self, node: Node) -> list[tuple[int, int]]:
        """(start, stop) in the blob of each parameter of a node that can hold addresses."""
        if node.kind == NodeKind.KERNEL:
            parameters = self.kernels[node.kernel].parameters
            return [(node.start + offset, node.start + offset + size) for offset, size in parameters]
        fixed = {NodeKind.MEMSET: MEMSET_POINTERS, NodeKind.MEMCPY: MEMCPY_POINTERS}.get(NodeKind(node.kind), ())
        return [(node.start + offset, node.start + offset + 8) for offset in fixed]


__all__ = [
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
