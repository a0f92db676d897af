"""What compiled code makes of a graph's tables, which calls it makes of the driver, and what a refused one leads to."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import StateError
from medusa_runtime.state.graphs import Blueprints, CudaDriver, GraphMismatch, restore_graphs
from medusa_runtime.state.graphs import compiled as compiled_graphs
from medusa_runtime.state.graphs.blob_format import decode_blueprints, encode_blueprints
from medusa_runtime.state.graphs.blueprint import Edge, GraphBlueprint, Relocation
from medusa_runtime.state.graphs.compiled import CALLS, CompiledBundle, used_ranges
from medusa_runtime.state.graphs.placement import Placement
from medusa_runtime.state.graphs.restoration.build import GraphBuilder
from medusa_runtime.state.graphs.tables import EdgeTable, NodeTable, RelocationTable

sys.path.insert(0, str(Path(__file__).parent))
from recording_driver import RecordingDriver, expected_calls
from small_graph import GRAPH, PLAIN, PROGRAMMATIC, WHOLE


@pytest.mark.parametrize("packed", [False, True])
def test_every_call_of_the_driver(packed: bool) -> None:
    blueprints = decode_blueprints(encode_blueprints(WHOLE)) if packed else WHOLE
    driver = RecordingDriver(blueprints)
    job = driver.build(blueprints.graphs[0])
    assert job.result == 0
    assert job.has_priority == 1
    assert driver.calls == expected_calls(WHOLE, GRAPH)
    connected = [given for name, given in driver.calls if name == "cuGraphAddDependencies_v2"]
    assert connected == [([(0, 1), (2, 3), (3, 5)], {PLAIN}), ([(1, 2), (2, 4)], {PROGRAMMATIC})]


def test_an_empty_graph() -> None:
    driver = RecordingDriver(Blueprints())
    assert driver.build(GraphBlueprint("empty", (), (), b"")).has_priority == 0
    assert driver.calls == []


def test_what_a_graph_uses() -> None:
    used = CompiledBundle(WHOLE).check(
        replace(GRAPH, nodes=GRAPH.nodes[:5], edges=(), relocations=GRAPH.relocations[1:2])
    )
    assert used == ((0, 1), (1,))
    pointing = replace(GRAPH, relocations=(Relocation(0, 2, 0),), pinned=(1,))
    assert used_ranges(replace(WHOLE, graphs=(pointing,))) == {
        1,
        2,
    }


@pytest.mark.parametrize(
    ("name", "at", "number"),
    [
        ("cuGraphAddKernelNode_v2", 1, 4),
        ("cuGraphAddMemsetNode", 0, 1),
        ("cuGraphAddMemcpyNode", 0, 2),
        ("cuGraphAddEmptyNode", 0, 3),
        ("cuGraphKernelNodeSetAttribute", 0, 0),
        ("cuGraphAddDependencies_v2", 1, -1),
        ("cuTensorMapReplaceAddress", 0, 2),
    ],
)
def test_the_call_that_is_refused(name: str, at: int, number: int) -> None:
    driver = RecordingDriver(WHOLE, refuse=name, at=at)
    job = driver.build(GRAPH)
    assert (CALLS[job.call], job.result, job.number) == (name, 1, number)
    whole = expected_calls(WHOLE, GRAPH)
    assert driver.calls == whole[: len(driver.calls)], "nothing is called after it"
    assert len(driver.calls) < len(whole)


def test_an_attribute_that_only_launches_have_may_be_refused() -> None:
    driver = RecordingDriver(WHOLE, refuse="cuGraphKernelNodeSetAttribute", at=1)
    assert driver.build(GRAPH).result == 0
    assert len(driver.calls) == len(expected_calls(WHOLE, GRAPH)) - 1


def test_a_range_that_was_not_placed() -> None:
    bundle = CompiledBundle(WHOLE)
    with pytest.raises(ValueError, match="a relocation of decode-1"):
        bundle.build(GRAPH, compiled_graphs.DriverCalls(), context=1, made=1)


def test_tables_are_sequences() -> None:
    packed = decode_blueprints(encode_blueprints(WHOLE)).graphs[0]
    for table, rows in ((packed.nodes, GRAPH.nodes), (packed.edges, GRAPH.edges)):
        assert table == rows
        assert rows == table
        assert table != rows[1:]
        assert (len(table), table[-1], list(table[1:3])) == (len(rows), rows[-1], list(rows[1:3]))
        with pytest.raises(IndexError):
            table[len(rows)]
    assert packed.relocations == GRAPH.relocations
    assert packed == GRAPH
    assert repr(packed.edges).startswith("EdgeTable(Edge(source=0, target=1, ")


def test_no_row_is_read_by_a_restore(monkeypatch: pytest.MonkeyPatch, toy: Any, materialized: dict[str, Any]) -> None:
    """A graph of a real model has thousands, which took longer than the driver."""
    data = Path(materialized["path"]).read_bytes()

    def never(*_: object) -> Any:
        raise AssertionError("a row was read")

    for table in (NodeTable, EdgeTable, RelocationTable):
        monkeypatch.setattr(table, "_row", never)
    blueprints = decode_blueprints(data)
    assert used_ranges(blueprints)
    driver = RecordingDriver(blueprints)
    for graph in blueprints.graphs:
        assert driver.build(replace(graph)).result == 0
        assert len(graph.nodes) > 0


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    compiled_graphs._functions.cache_clear()
    monkeypatch.setattr(compiled_graphs, "LIBRARY", tmp_path / "libmedusa_kernels.so")
    yield
    compiled_graphs._functions.cache_clear()


@pytest.mark.usefixtures("without_library")
def test_without_the_library_graphs_are_captured(fake_cuda: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StateError, match=r"they need libmedusa_kernels.so \(.*\); `python -m medusa_runtime.kernels"):
        decode_blueprints(encode_blueprints(WHOLE))
    driver = CudaDriver(str(fake_cuda))
    with caplog.at_level(logging.WARNING):
        restored = restore_graphs(
            driver, WHOLE, Placement(driver, {}), keys=["decode-1", "decode-2"], stream=0, fingerprint={}
        )
    assert restored.graphs == {}
    (line,) = caplog.messages
    assert line.startswith("2 CUDA graphs are captured, not restored: not-compiled: they need libmedusa_kernels.so")


def test_a_library_of_other_sources(monkeypatch: pytest.MonkeyPatch, without_library: None) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(compiled_graphs, "_INTERFACE", 0)
    with pytest.raises(StateError, match="expected interface 0 of graphs, found 1"):
        CompiledBundle(WHOLE)


def test_a_graph_that_is_wrong_is_not_built(fake_cuda: Path) -> None:
    driver = CudaDriver(str(fake_cuda))
    wrong = replace(GRAPH, edges=(Edge(0, 6, PLAIN),))
    with pytest.raises(GraphMismatch, match="corrupt: an edge of decode-1"):
        GraphBuilder(driver, WHOLE).used(wrong)
