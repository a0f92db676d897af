"""What toy.py changes in a bundle before it restores it."""

from __future__ import annotations

from dataclasses import replace

from medusa_runtime.state.graphs import Blueprints
from medusa_runtime.state.graphs.blob_format import decode_blueprints


def with_damaged_image(data: bytes, variable: str, other: str) -> Blueprints:
    """Read a bundle after a byte of the image with this variable has changed. The ``other`` graph does not use it."""
    whole = decode_blueprints(data)
    image = next(one.name.partition(":")[0] for one in whole.ranges if one.name.endswith(f":{variable}"))
    made = bytearray(data)
    made[data.index(whole.images[image]) + 1000] ^= 1
    read = decode_blueprints(bytes(made))
    graphs = []
    for graph in read.graphs:
        if graph.key == other:
            nodes = [node for node in graph.nodes if node.kernel < 0 or read.kernels[node.kernel].image != image]
            kept = {position for node in nodes for position in range(node.start, node.start + node.size)}
            relocations = tuple(one for one in graph.relocations if one.position in kept)
            graph = replace(graph, nodes=tuple(nodes), edges=(), relocations=relocations)
        graphs.append(graph)
    return replace(read, graphs=tuple(graphs))


def _without_attributes(blueprints: Blueprints) -> Blueprints:
    return replace(blueprints, attribute_sets=tuple(() for _ in blueprints.attribute_sets))


def _without_edges(blueprints: Blueprints) -> Blueprints:
    return replace(blueprints, graphs=tuple(replace(graph, edges=graph.edges[:-1]) for graph in blueprints.graphs))


def _without_contents(blueprints: Blueprints) -> Blueprints:
    return replace(blueprints, contents=())


def _without_images(blueprints: Blueprints) -> Blueprints:
    return replace(blueprints, images={})


def _without_variables(blueprints: Blueprints) -> Blueprints:
    kernels = tuple(kernel._replace(name=kernel.name + "_gone") for kernel in blueprints.kernels)
    return replace(blueprints, kernels=kernels)


def _without_allowances(blueprints: Blueprints) -> Blueprints:
    kernels = tuple(kernel._replace(attributes=()) for kernel in blueprints.kernels)
    return replace(blueprints, kernels=kernels)


CHANGES = {
    "attributes": _without_attributes,
    "edges": _without_edges,
    "contents": _without_contents,
    "images": _without_images,
    "names": _without_variables,
    "allowances": _without_allowances,
}
