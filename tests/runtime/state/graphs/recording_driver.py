"""The driver's functions that ``kernels/source/graphs.c`` calls: they read what a driver would, and note it."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any, NamedTuple

from medusa_runtime.state.graphs.blueprint import Blueprints, GraphBlueprint
from medusa_runtime.state.graphs.compiled import CALLS, BuildJob, CompiledBundle, DriverCalls
from medusa_runtime.state.graphs.driver import _LETTERS, SIGNATURES
from medusa_runtime.state.graphs.structs import ATTRIBUTE_BYTES, MEMCPY_NODE_BYTES, MEMSET_NODE, KernelNodeParams
from medusa_runtime.state.graphs.tensor_map import MAP_BYTES

CONTEXT, GRAPH, FIRST_NODE, KERN = 0xC0, 0x60, 0x1000, 0x2000
ADDRESSES = (0x6000_0000_0000, 0x5000_0000_0000)
"""Where memory ranges are: the even ones and the odd ones."""
MAP_ALIGNMENT = 128


class KernelNode(NamedTuple):
    kernel: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    values: tuple[bytes, ...]


class RecordingDriver:
    """``calls`` is what was called: the name, and what was given.

    Refuses call ``at`` of ``refuse``. Tensor maps are their address and what does not depend on it.
    """

    def __init__(self, blueprints: Blueprints, *, refuse: str = "", at: int = 0) -> None:
        self._blueprints = blueprints
        self._refuse = refuse, at
        self._nodes = 0
        self.calls: list[tuple[str, Any]] = []
        self._functions = [
            ctypes.CFUNCTYPE(ctypes.c_int, *(_LETTERS[letter] for letter in SIGNATURES[name]))(
                partial(self._called, name)
            )
            for name in CALLS
        ]
        self._pointers = DriverCalls(*[ctypes.cast(one, ctypes.c_void_p) for one in self._functions])
        self._bundle = CompiledBundle(blueprints)

    def build(self, graph: GraphBlueprint) -> BuildJob:
        used = self._bundle.check(graph)
        self._bundle.find({number: (number + 1, 0 if number % 2 else KERN) for number in used.kernels})
        self._bundle.place({number: ADDRESSES[number % 2] for number in used.ranges})
        return self._bundle.build(graph, self._pointers, context=CONTEXT, made=GRAPH)

    def _called(self, name: str, *given: Any) -> int:
        if (name, sum(one == name for one, _ in self.calls)) == self._refuse:
            return 1
        if name.startswith("cuGraphAdd") and name != "cuGraphAddDependencies_v2":
            out, graph, after, count, *rest = given
            assert (graph, after, count) == (GRAPH, None, 0)
            ctypes.c_uint64.from_address(out).value = FIRST_NODE + self._nodes
            self._nodes += 1
            self.calls.append((name, self._node(name, *rest)))
        elif name == "cuGraphAddDependencies_v2":
            graph, *ends, data, count = given
            assert graph == GRAPH
            ends = [[at - FIRST_NODE for at in (ctypes.c_uint64 * count).from_address(each)] for each in ends]
            kinds = ctypes.string_at(data, 8 * count)
            self.calls.append(
                (name, (list(zip(*ends, strict=True)), {kinds[i : i + 8] for i in range(0, len(kinds), 8)}))
            )
        elif name == "cuGraphKernelNodeSetAttribute":
            node, number, value = given
            self.calls.append((name, (node - FIRST_NODE, number, ctypes.string_at(value, ATTRIBUTE_BYTES))))
        else:
            at, address = given
            assert at % MAP_ALIGNMENT == 0
            data = ctypes.string_at(at, MAP_BYTES)
            ctypes.memmove(at, replaced(data, address), MAP_BYTES)
            self.calls.append((name, address))
        return 0

    def _node(self, name: str, params: int = 0, context: int = CONTEXT) -> Any:
        if name == "cuGraphAddEmptyNode":
            return None
        assert params % 8 == 0
        assert context == CONTEXT
        if name != "cuGraphAddKernelNode_v2":
            return ctypes.string_at(params, MEMSET_NODE.size if name == "cuGraphAddMemsetNode" else MEMCPY_NODE_BYTES)
        node = KernelNodeParams.from_address(params)
        assert (node.extra, node.ctx) == (None, CONTEXT)
        kernel = node.func - 1
        assert node.kern == (None if kernel % 2 else KERN)
        parameters = self._blueprints.kernels[kernel].parameters
        pointers = (ctypes.c_uint64 * len(parameters)).from_address(node.params)
        values = (ctypes.string_at(at, size) for at, (_, size) in zip(pointers, parameters, strict=True))
        return KernelNode(kernel, tuple(node.grid), tuple(node.block), node.shared_bytes, tuple(values))


def replaced(data: bytes, address: int) -> bytes:
    """Return a tensor map with another address, as this driver makes it."""
    return address.to_bytes(8, "little") + data[8:]


def expected_calls(blueprints: Blueprints, graph: GraphBlueprint) -> list[tuple[str, Any]]:
    """Return the calls that build a graph."""
    blob, calls, numbers = bytearray(graph.blob), list[tuple[str, Any]](), []
    for position, memory_range, offset, is_map in graph.relocations:
        address = ADDRESSES[memory_range % 2] + offset
        size = MAP_BYTES if is_map else 8
        if is_map:
            calls.append((CALLS[6], address))
        blob[position : position + size] = replaced(blob[position : position + size], address)
    for number, node in enumerate(graph.nodes):
        data = bytes(blob[node.start : node.start + node.size])
        if node.kind == 0:
            parameters = blueprints.kernels[node.kernel].parameters
            values = tuple(data[offset : offset + size] for offset, size in parameters)
            calls.append((CALLS[0], KernelNode(node.kernel, node.grid, node.block, node.shared_bytes, values)))
            calls += [(CALLS[4], (number, *entry)) for entry in blueprints.attribute_sets[node.attributes]]
        else:
            name, size = {2: (CALLS[1], 40), 1: (CALLS[2], 200), 5: (CALLS[3], 0)}[node.kind]
            calls.append((name, data[:size] if size else None))
        numbers.append(number)
    for kind in dict.fromkeys(edge.data for edge in graph.edges):
        ends = [(edge.source, edge.target) for edge in graph.edges if edge.data == kind]
        calls.append((CALLS[5], (ends, {kind})))
    return calls


def is_right(blueprints: Blueprints, graph: GraphBlueprint) -> bool:
    """Return whether every reference in a graph's tables is to something that exists, without compiled code."""
    kernels, blob, count = blueprints.kernels, len(graph.blob), len(graph.nodes)
    for node in graph.nodes:
        if node.kind == 0:
            if not 0 <= node.kernel < len(kernels):
                return False
            needed = max((offset + size for offset, size in kernels[node.kernel].parameters), default=0)
        elif node.kind in (1, 2, 5) and node.kernel == -1:
            needed = {1: 200, 2: 40, 5: 0}[node.kind]
        else:
            return False
        if node.attributes >= len(blueprints.attribute_sets) or node.start + node.size > blob or node.size < needed:
            return False
    if any(edge.source >= count or edge.target >= count for edge in graph.edges):
        return False
    return all(
        relocation.position + (MAP_BYTES if relocation.map else 8) <= blob
        and relocation.memory_range < len(blueprints.ranges)
        and relocation.offset <= blueprints.ranges[relocation.memory_range].size
        for relocation in graph.relocations
    )
