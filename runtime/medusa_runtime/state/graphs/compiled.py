"""Check and build a bundle's graphs in compiled code (``kernels/source/graphs.c``), with one call for each graph."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from itertools import compress
from typing import Any, ClassVar, NamedTuple

from ...compiled_library import LIBRARY
from ...errors import StateError
from .blueprint import Blueprints, GraphBlueprint
from .driver import CudaDriver
from .structs import ATTRIBUTE_BYTES
from .tables import EdgeTable, NodeTable, RelocationTable

_INTERFACE = 1  # the version of graphs.c's interface
_POINTER, _WORD, _INT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
_LARGEST = (1 << 64) - 1
CALLS = (  # the driver's functions that are called (``struct driver``)
    "cuGraphAddKernelNode_v2",
    "cuGraphAddMemsetNode",
    "cuGraphAddMemcpyNode",
    "cuGraphAddEmptyNode",
    "cuGraphKernelNodeSetAttribute",
    "cuGraphAddDependencies_v2",
    "cuTensorMapReplaceAddress",
)
# The statuses that graphs.c returns: 0 for a right graph, and one more, which a job's results explain.
_WRONG = {1: "a node", 2: "parameters of a node", 3: "an edge", 4: "a relocation"}
_NO_MEMORY = 5


class NotCompiledError(StateError):
    """The compiled library is missing, without which no graph is read or restored."""


class Used(NamedTuple):
    """The numbers of what a graph uses: kernels that it launches, and memory ranges that it points into."""

    kernels: tuple[int, ...]
    ranges: tuple[int, ...]


class _Range(ctypes.Structure):
    _fields_: ClassVar = [("address", _WORD), ("size", _WORD)]


class _Kernel(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, _WORD) for name in ("func", "kern", "bytes")),
        ("offsets", _POINTER),
        ("parameters", _WORD),
    ]


class _Attribute(ctypes.Structure):
    _fields_: ClassVar = [("number", ctypes.c_int64), ("value", ctypes.c_ubyte * ATTRIBUTE_BYTES)]


class _AttributeSet(ctypes.Structure):
    _fields_: ClassVar = [("first", _POINTER), ("count", _WORD)]


class _Bundle(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("ranges", "kernels", "sets")),
        *((name, _WORD) for name in ("range_count", "kernel_count", "set_count")),
    ]


class _Graph(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_char_p) for name in ("nodes", "edges", "relocations", "blob")),
        *((name, _WORD) for name in ("node_count", "edge_count", "relocation_count", "blob_bytes")),
    ]


class DriverCalls(ctypes.Structure):
    """Pointers to the driver's functions (``struct driver``)."""

    _fields_: ClassVar = [(name, _POINTER) for name in CALLS]


class BuildJob(ctypes.Structure):
    """A graph to build, and the call that the driver refused, if any (``struct build_job``)."""

    _fields_: ClassVar = [
        ("graph", ctypes.POINTER(_Graph)),
        ("bundle", ctypes.POINTER(_Bundle)),
        ("driver", ctypes.POINTER(DriverCalls)),
        *((name, _POINTER) for name in ("context", "made")),
        ("number", ctypes.c_int64),
        *((name, _INT) for name in ("result", "call", "has_priority")),
    ]


class _Functions:
    def __init__(self) -> None:
        try:
            library = ctypes.CDLL(str(LIBRARY))
            if (found := library.medusa_graphs_interface()) != _INTERFACE:
                raise NotCompiledError(_missing(f"expected interface {_INTERFACE} of graphs, found {found}"))
            self.check: Any = library.medusa_check_graph
            self.build: Any = library.medusa_build_graph
        except (OSError, AttributeError) as error:
            raise NotCompiledError(_missing(str(error))) from error
        self.check.argtypes = [ctypes.POINTER(_Graph), ctypes.POINTER(_Bundle), _POINTER, _POINTER]
        self.build.argtypes = [ctypes.POINTER(BuildJob)]


def _missing(why: str) -> str:
    return f"they need {LIBRARY.name} ({why}); `python -m medusa_runtime.kernels.build` makes it"


@functools.cache
def _functions() -> _Functions:
    return _Functions()


class CompiledBundle:
    """The memory ranges, kernels and attribute sets of a bundle, packed once for compiled code."""

    def __init__(self, blueprints: Blueprints) -> None:
        """Raises NotCompiledError without the compiled library, ValueError for attributes of a wrong size."""
        self._functions = _functions()
        self._ranges = (_Range * len(blueprints.ranges))(*[_Range(0, one.size) for one in blueprints.ranges])
        offsets = [[offset for offset, _ in kernel.parameters] or [0] for kernel in blueprints.kernels]
        ends = [max((offset + size for offset, size in one.parameters), default=0) for one in blueprints.kernels]
        self._offsets = [(_WORD * len(each))(*each) for each in offsets]
        self._kernels = (_Kernel * len(offsets))(
            *[
                _Kernel(0, 0, min(end, _LARGEST), ctypes.addressof(each), len(each))
                for end, each in zip(ends, self._offsets, strict=True)
            ]
        )
        self._attributes = [_packed_attributes(entries) for entries in blueprints.attribute_sets]
        self._sets = (_AttributeSet * len(self._attributes))(
            *[_AttributeSet(ctypes.addressof(each), len(each)) for each in self._attributes]
        )
        self._bundle = _Bundle(
            *(ctypes.addressof(part) for part in (self._ranges, self._kernels, self._sets)),
            *(len(part) for part in (self._ranges, self._kernels, self._sets)),
        )

    def check(self, graph: GraphBlueprint) -> Used:
        """Return what a graph uses.

        Raises ValueError unless every reference in its tables is to something that exists.
        """
        kernels, ranges = ((ctypes.c_ubyte * len(part))() for part in (self._kernels, self._ranges))
        if status := self._functions.check(_packed_graph(graph), self._bundle, kernels, ranges):
            raise ValueError(f"{_WRONG[status]} of {graph.key}")
        return Used(*(tuple(compress(range(len(marks)), bytes(marks))) for marks in (kernels, ranges)))

    def place(self, addresses: Mapping[int, int]) -> None:
        """Set where memory ranges are now, by their numbers. What is right is not written, as others may read it."""
        for number, address in addresses.items():
            if self._ranges[number].address != address:
                self._ranges[number].address = address

    def find(self, kernels: Mapping[int, tuple[int, int]]) -> None:
        """Set the handles (CUfunction, CUkernel) of kernels, by their numbers. What is right is not written."""
        for number, handle in kernels.items():
            kernel = self._kernels[number]
            if (kernel.func, kernel.kern) != handle:
                kernel.func, kernel.kern = handle

    def build(self, graph: GraphBlueprint, calls: DriverCalls, *, context: int, made: int) -> BuildJob:
        """Add a graph's nodes and edges to the empty CUgraph ``made``, and return the results.

        All ranges and kernels that the graph uses must have been placed and found. Raises ValueError as ``check`` does,
        and MemoryError.
        """
        packed = _packed_graph(graph)
        job = BuildJob(ctypes.pointer(packed), ctypes.pointer(self._bundle), ctypes.pointer(calls), context, made)
        status = self._functions.build(job)
        if status == _NO_MEMORY:
            raise MemoryError(f"no memory on the host to build {graph.key}")
        if status in _WRONG:
            raise ValueError(f"{_WRONG[status]} of {graph.key}")
        return job


def used_ranges(blueprints: Blueprints) -> set[int]:
    """Return the numbers of the ranges into which a graph points, or that a graph pins."""
    bundle = CompiledBundle(blueprints)
    return {number for graph in blueprints.graphs for number in (*graph.pinned, *bundle.check(graph).ranges)}


def driver_calls(driver: CudaDriver) -> DriverCalls:
    """Return the driver's functions for ``CompiledBundle.build``. Raises DeviceError if one is missing."""
    return DriverCalls(*[ctypes.cast(driver.bind(name), _POINTER) for name in CALLS])


def _packed_graph(graph: GraphBlueprint) -> _Graph:
    tables = NodeTable.of(graph.nodes), EdgeTable.of(graph.edges), RelocationTable.of(graph.relocations)
    sizes = len(graph.nodes), len(graph.edges), len(graph.relocations), len(graph.blob)
    return _Graph(*(table.data for table in tables), graph.blob, *sizes)


def _packed_attributes(entries: tuple[tuple[int, bytes], ...]) -> ctypes.Array[_Attribute]:
    packed = (_Attribute * len(entries))()
    for attribute, (number, value) in zip(packed, entries, strict=True):
        if len(value) != ATTRIBUTE_BYTES or not -(1 << 31) <= number < 1 << 31:
            raise ValueError("an attribute of nodes")
        attribute.number, attribute.value[:] = number, value
    return packed


__all__ = [
    "CALLS",
    "BuildJob",
    "CompiledBundle",
    "DriverCalls",
    "NotCompiledError",
    "Used",
    "driver_calls",
    "used_ranges",
]
