"""Build an executable graph from a blueprint."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref, c_uint64

from ..blueprint import AttributeSet, Blueprints, Edge, GraphBlueprint, Node, NodeKind
from ..driver import CudaDriver, CudaError
from ..mismatch import GraphMismatch, Reason
from ..structs import KERNEL_NODE, PROGRAMMATIC, InstantiateParams
from ..tensor_map import MAP_BYTES, replacer
from .kernels import KernelHandle

_UPLOAD, _USE_NODE_PRIORITY = 2, 8
_PRIORITY = 8


def build(
    driver: CudaDriver,
    blueprints: Blueprints,
    graph: GraphBlueprint,
    *,
    kernels: Sequence[KernelHandle],
    addresses: Sequence[int],
    stream: int,
) -> int:
    """Build an executable graph (CUgraphExec), which the caller destroys. Arguments and errors as in ``construct``."""
    cuda_graph = construct(driver, blueprints, graph, kernels=kernels, addresses=addresses)
    try:
        return _instantiate(driver, blueprints, graph, cuda_graph, stream)
    except CudaError as error:
        raise GraphMismatch(Reason.DRIVER_CALL, f"{error}: the whole") from error
    finally:
        driver.result("cuGraphDestroy", cuda_graph)


def construct(
    driver: CudaDriver,
    blueprints: Blueprints,
    graph: GraphBlueprint,
    *,
    kernels: Sequence[KernelHandle],
    addresses: Sequence[int],
) -> int:
    """Make the graph's nodes and edges (a CUgraph, which the caller destroys).

    ``kernels`` has a handle for each of ``blueprints.kernels`` that the graph uses, and ``addresses`` one address for
    each relocation. Raises GraphMismatch (DRIVER_CALL) if the driver refuses.
    """
    blob = ctypes.create_string_buffer(graph.blob, max(len(graph.blob), 1))
    base = addressof(blob)
    words = memoryview(blob).cast("B")
    for relocation, address in zip(graph.relocations, addresses, strict=True):
        if relocation.map:
            _replace_map(driver, words[relocation.position : relocation.position + MAP_BYTES], address)
        else:
            words[relocation.position : relocation.position + 8] = address.to_bytes(8, "little")
    context = driver.current_context()
    cuda_graph = driver.handle("cuGraphCreate", 0)
    node: Node | None = None
    nodes = (c_uint64 * max(len(graph.nodes), 1))()
    first, add_kernel = addressof(nodes), driver.bind("cuGraphAddKernelNode_v2")
    pointers, params = _packed(blueprints, graph, kernels, base, context)
    at = addressof(params)
    try:
        for number, node in enumerate(graph.nodes):
            out = first + 8 * number
            if node.kind == NodeKind.KERNEL:
                # Not by driver.call, which is slower: a start does this tens of thousands of times.
                if code := add_kernel(out, cuda_graph, None, 0, at):
                    driver.check("cuGraphAddKernelNode_v2", code)
                at += KERNEL_NODE.size
                if node.attributes:
                    _set_attributes(driver, nodes[number], blueprints.attribute_sets[node.attributes])
            elif node.kind == NodeKind.MEMSET:
                driver.call("cuGraphAddMemsetNode", out, cuda_graph, None, 0, base + node.start, context)
            elif node.kind == NodeKind.MEMCPY:
                driver.call("cuGraphAddMemcpyNode", out, cuda_graph, None, 0, base + node.start, context)
            else:
                driver.call("cuGraphAddEmptyNode", out, cuda_graph, None, 0)
        node = None
        _connect(driver, graph, cuda_graph, nodes)
    except CudaError as error:
        driver.result("cuGraphDestroy", cuda_graph)
        raise GraphMismatch(Reason.DRIVER_CALL, f"{error}: {_about(blueprints, node)}") from error
    del pointers  # the driver has read them until here
    return cuda_graph


def _about(blueprints: Blueprints, node: Node | None) -> str:
    """Describe for a message what the driver was asked to make."""
    if node is None:
        return "the edges"
    if node.kind != NodeKind.KERNEL:
        return f"a {NodeKind(node.kind).name.lower()} node"
    numbers = [number for number, _ in blueprints.attribute_sets[node.attributes]]
    kernel = blueprints.kernels[node.kernel]
    return f"{kernel.name}, {node.shared_bytes} bytes of shared memory, attributes {numbers}"


def _replace_map(driver: CudaDriver, data: memoryview, address: int) -> None:
    replaced = replacer(driver)(bytes(data), address)
    if replaced is None:
        raise GraphMismatch(Reason.DRIVER_CALL, f"the driver writes no address {address:#x} into a tensor map")
    data[:] = replaced


def _packed(
    blueprints: Blueprints, graph: GraphBlueprint, kernels: Sequence[KernelHandle], base: int, context: int
) -> tuple[ctypes.Array[c_uint64], ctypes.Array[ctypes.c_char]]:
    """Return the kernelParams arrays of all kernel nodes, one after the other, and the nodes' parameter structures.

    The structures point into the arrays. The blob has all parameters of a kernel, so the driver needs no sizes.
    """
    offsets = [[offset for offset, _ in kernel.parameters] or [0] for kernel in blueprints.kernels]
    launched = [node for node in graph.nodes if node.kind == NodeKind.KERNEL]
    addresses = [base + node.start + offset for node in launched for offset in offsets[node.kernel]]
    pointers = (c_uint64 * max(len(addresses), 1))(*addresses)
    at, packed = addressof(pointers), []
    for node in launched:
        func, kern = kernels[node.kernel]
        packed.append(KERNEL_NODE.pack(func, *node.grid, *node.block, node.shared_bytes, at, 0, kern, context))
        at += 8 * len(offsets[node.kernel])
    return pointers, ctypes.create_string_buffer(b"".join(packed), max(KERNEL_NODE.size * len(packed), 1))


def _set_attributes(driver: CudaDriver, node: int, attributes: AttributeSet) -> None:
    for attribute, value in attributes:
        code = driver.result("cuGraphKernelNodeSetAttribute", node, attribute, value)
        if attribute != PROGRAMMATIC:  # may fail: some drivers only know it for launches, and the edges say the same
            driver.check("cuGraphKernelNodeSetAttribute", code)


def _connect(driver: CudaDriver, graph: GraphBlueprint, cuda_graph: int, nodes: ctypes.Array[c_uint64]) -> None:
    """Add the edges, with one call for each value of their data.

    Drivers from 580.126 to 610.57 give all edges of a call the data of its first one (found by Foundry).
    """
    kinds: dict[bytes, list[Edge]] = {}
    for edge in graph.edges:
        kinds.setdefault(edge.data, []).append(edge)
    for data, edges in kinds.items():
        count = len(edges)
        sources = (c_uint64 * count)(*[nodes[edge.source] for edge in edges])
        targets = (c_uint64 * count)(*[nodes[edge.target] for edge in edges])
        driver.call("cuGraphAddDependencies_v2", cuda_graph, sources, targets, data * count, count)


def _instantiate(
    driver: CudaDriver, blueprints: Blueprints, graph: GraphBlueprint, cuda_graph: int, stream: int
) -> int:
    prioritised = any(
        attribute == _PRIORITY for node in graph.nodes for attribute, _ in blueprints.attribute_sets[node.attributes]
    )
    # Upload at once, so that the first launch does not pay for it.
    flags = _UPLOAD | (_USE_NODE_PRIORITY if prioritised else 0)
    params = InstantiateParams(flags=flags, upload_stream=stream)
    return driver.handle("cuGraphInstantiateWithParams", cuda_graph, byref(params))
