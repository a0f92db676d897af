"""What two processes captured on a real GPU: an H200, driver 580.159, torch 2.11 for CUDA 13, triton 3.6.

``captures/h200.json.gz`` has the dumps of ``python -m benchmarks.gpu.probe`` there: products by NVIDIA's generated
kernels (nvjet), norms, triton's variants, a programmatic pair, attention, two layers.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.state.graphs import Blueprints, MemoryRange, RangeKind
from medusa_runtime.state.graphs.blueprint import Edge, GraphBlueprint, KernelRecord, Node
from medusa_runtime.state.graphs.materialization.relocate import RelocationResult, find_relocations

# In each graph; restored at other addresses with them, it gave the same bits.
POINTERS = {
    "product of 1 row": 26,
    "product of 64 rows": 19,
    "rms norm": 6,
    "silu": 7,
    "copy and zero": 3,
    "two layers": 68,
    "triton variants": 4,
    "programmatic pair": 4,
    "attention": 28,
}


def blueprints(kept: dict[str, Any]) -> Blueprints:
    return Blueprints(
        ranges=tuple(MemoryRange(name, RangeKind(kind), at, size) for name, kind, at, size in kept["ranges"]),
        kernels=tuple(
            KernelRecord(name, image, tuple(map(tuple, parameters)), tuple(map(tuple, attributes)))
            for name, image, parameters, attributes in kept["kernels"]
        ),
        attribute_sets=tuple(
            tuple((number, bytes.fromhex(value)) for number, value in entries) for entries in kept["attribute_sets"]
        ),
        graphs=tuple(
            GraphBlueprint(
                graph["key"],
                tuple(Node(*row[:3], tuple(row[3:6]), tuple(row[6:9]), *row[9:]) for row in graph["nodes"]),
                tuple(Edge(source, target, bytes.fromhex(data)) for source, target, data in graph["edges"]),
                bytes.fromhex(graph["blob"]),
            )
            for graph in kept["graphs"]
        ),
        host=tuple(map(tuple, kept["host"])),
    )


@pytest.fixture(scope="module")
def captures() -> tuple[Blueprints, Blueprints]:
    kept = json.loads(gzip.decompress((Path(__file__).parent / "captures/h200.json.gz").read_bytes()))
    return blueprints(kept["first"]), blueprints(kept["second"])


@pytest.fixture(scope="module")
def found(captures: tuple[Blueprints, Blueprints]) -> RelocationResult:
    return find_relocations(*captures)


def test_all_pointers_are_found_and_nothing_else(found: RelocationResult) -> None:
    assert found.blueprints.refused == {}
    assert found.words == {"constant": 868, "pointer": 165, "stale": 6}
    assert {graph.key: len(graph.relocations) for graph in found.blueprints.graphs} == POINTERS
    assert not any(graph.pinned for graph in found.blueprints.graphs)


def test_each_pointer_leads_to_the_same_place_in_both(
    found: RelocationResult, captures: tuple[Blueprints, Blueprints]
) -> None:
    """The second capture's bytes are the first's, moved; the graphs' pool and named memory moved by other distances."""
    second = {memory_range.name: memory_range for memory_range in captures[1].ranges}
    moved = set()
    for graph in found.blueprints.graphs:
        other = captures[1].graph(graph.key).blob
        for relocation in graph.relocations:
            name = found.blueprints.ranges[relocation.memory_range].name
            word = int.from_bytes(other[relocation.position : relocation.position + 8], "little")
            assert word == second[name].address + relocation.offset
            moved.add(word - int.from_bytes(graph.blob[relocation.position : relocation.position + 8], "little"))
    assert len(moved) > 1


def test_kernels_have_their_images_and_a_programmatic_pair_its_edge(found: RelocationResult) -> None:
    kernels = found.blueprints.kernels
    assert all(kernel.image for kernel in kernels), "those of a namespace without a name, too"
    assert any(kernel.name.startswith("nvjet_sm90") for kernel in kernels)
    (edge,) = found.blueprints.graph("programmatic pair").edges
    assert edge.data == bytes.fromhex("0100010000000000")
