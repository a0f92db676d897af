"""Everything that the driver says about a captured graph, so that a failure can be reproduced at a desk."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int
from typing import Any

from medusa_runtime.state.graphs import CudaDriver, ImageStore
from medusa_runtime.state.graphs.blueprint import GraphBlueprint, NodeKind
from medusa_runtime.state.graphs.driver import CudaError
from medusa_runtime.state.graphs.materialization.dump import edges_of, kernel_of, node_kind, nodes_of
from medusa_runtime.state.graphs.structs import ATTRIBUTE_BYTES

from benchmarks.gpu.probing.ground import Facts

_LAUNCH_ATTRIBUTES, _FUNCTION_ATTRIBUTES = range(1, 18), range(17)


def nodes(driver: CudaDriver, graph: int, images: ImageStore) -> list[Facts]:
    """For each node: its kind and, of a kernel, its name, handles, attributes with the driver's return codes, image."""
    return [_node(driver, node, images) for node in nodes_of(driver, graph)]


def _node(driver: CudaDriver, node: int, images: ImageStore) -> Facts:
    kind = node_kind(driver, node)
    if kind != NodeKind.KERNEL:
        return {"kind": kind}
    params, name, layout = kernel_of(driver, node)
    device = driver.current_device()
    func = params.func or driver.optional("cuKernelGetFunction", params.kern)
    handles = {
        "func": bool(params.func),
        "kern": bool(params.kern),
        "function of the kernel": bool(func),
        "module": driver.optional("cuFuncGetModule", func) if func else 0,
        "library": driver.optional("cuKernelGetLibrary", params.kern) if params.kern else 0,
    }
    found: Facts = {
        "kind": kind,
        "name": name,
        "layout": layout,
        "grid": list(params.grid),
        "block": list(params.block),
        "shared_bytes": params.shared_bytes,
        "extra": bool(params.extra),
        "handles": handles,
        "attributes": _launch_attributes(driver, node),
        "function": _function_attributes(driver, "cuFuncGetAttribute", func) if func else {},
    }
    if params.kern:
        found["kernel"] = _function_attributes(driver, "cuKernelGetAttribute", params.kern, device)
    registers = found["function"].get("4", found.get("kernel", {}).get("4", [0, 0]))[1]
    by_name, by_handle = (
        images.of(name, layout, registers),
        images.of(name, layout, registers, [handle for handle in (handles["module"], handles["library"]) if handle]),
    )
    found["image"] = {"by name": by_name, "by handle": by_handle}
    return found


def _launch_attributes(driver: CudaDriver, node: int) -> dict[str, list[Any]]:
    found = {}
    for number in _LAUNCH_ATTRIBUTES:
        value = ctypes.create_string_buffer(ATTRIBUTE_BYTES)
        code = driver.result("cuGraphKernelNodeGetAttribute", node, number, value)
        found[str(number)] = [code, value.raw.rstrip(b"\0").hex()]
    return found


def _function_attributes(driver: CudaDriver, call: str, handle: int, *device: int) -> dict[str, list[int]]:
    found = {}
    for number in _FUNCTION_ATTRIBUTES:
        value = c_int()
        code = driver.result(call, byref(value), number, handle, *device)
        found[str(number)] = [code, value.value]
    return found


def edges(driver: CudaDriver, graph: int) -> list[list[Any]]:
    """[source, target, data] of each edge, by the numbers of nodes, sorted."""
    number = {node: n for n, node in enumerate(nodes_of(driver, graph))}
    return sorted([number[source], number[target], data.hex()] for source, target, data in edges_of(driver, graph))


def differences(driver: CudaDriver, captured: int, made: int, images: ImageStore) -> list[str]:
    """Return what a graph that was made says otherwise than the captured one, beside handles and images."""
    found = []
    try:
        if edges(driver, captured) != edges(driver, made):
            found.append(f"edges: {edges(driver, captured)} were captured, {edges(driver, made)} made")
        pairs = zip(nodes(driver, captured, images), nodes(driver, made, images), strict=True)
        for n, (one, other) in enumerate(pairs):
            for key in ("kind", "name", "layout", "grid", "block", "shared_bytes", "attributes"):
                if one.get(key) != other.get(key):
                    found.append(f"node {n}: {key}: {one.get(key)} was captured, {other.get(key)} made")
    except (CudaError, ValueError) as error:
        found.append(f"reading it back failed: {error}")
    return found


def parameters(graph: GraphBlueprint) -> list[str]:
    """The parameter bytes of each node, in hexadecimal."""
    return [graph.blob[node.start : node.start + node.size].hex() for node in graph.nodes]


def words(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many words of eight bytes differ between two captures' parameters."""
    return sum(
        a[at : at + 16] != b[at : at + 16] for a, b in zip(one, other, strict=False) for at in range(0, len(a), 16)
    )


__all__ = ["differences", "edges", "nodes", "parameters", "words"]
