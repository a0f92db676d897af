"""Run by test_graph_fuzz.py with a library that AddressSanitizer watches: what a file may give to compiled code.

LD_PRELOAD=libasan.so python fuzz_graphs.py LIBRARY
"""

from __future__ import annotations

import hashlib
import struct
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "support/processes"))
sys.path.insert(0, str(Path(__file__).parent))
from fuzzing import fuzz
from hypothesis import strategies as st
from medusa_runtime.errors import StateError
from medusa_runtime.state.graphs import compiled as compiled_graphs
from medusa_runtime.state.graphs.blob_format import decode_blueprints, encode_blueprints
from medusa_runtime.state.graphs.blueprint import Edge
from medusa_runtime.state.graphs.compiled import used_ranges
from medusa_runtime.state.graphs.tables import EdgeTable, NodeTable, RelocationTable
from recording_driver import RecordingDriver, expected_calls, is_right
from small_graph import GRAPH, WHOLE

HEAD = struct.Struct("<BBB")  # how many nodes, edges and relocations
BODY_AT = 68
built = 0


def packed(nodes: bytes, edges: bytes, relocations: bytes, blob: bytes) -> bytes:
    sizes = len(nodes) // NodeTable.ROW.size, len(edges) // EdgeTable.ROW.size
    return HEAD.pack(*sizes, len(relocations) // RelocationTable.ROW.size) + nodes + edges + relocations + blob


def build_from_tables(data: bytes) -> None:
    """Compiled code takes what the check in Python takes, and makes the calls that the rows ask for."""
    global built
    data = data.ljust(HEAD.size, b"\0")
    parts, at = [], HEAD.size
    for count, table in zip(HEAD.unpack_from(data), (NodeTable, EdgeTable, RelocationTable), strict=True):
        size = min(count, (len(data) - at) // table.ROW.size) * table.ROW.size
        parts.append(table(data[at : at + size]))
        at += size
    graph = replace(GRAPH, nodes=parts[0], edges=parts[1], relocations=parts[2], blob=data[at:])
    right = is_right(WHOLE, graph) and all(row[3] <= 1 for row in RelocationTable.ROW.iter_unpack(parts[2].data))
    driver = RecordingDriver(WHOLE)
    try:
        job = driver.build(graph)
    except ValueError:
        assert not right
        assert driver.calls == []
        return
    assert right
    assert job.result == 0
    assert driver.calls == expected_calls(WHOLE, graph)
    built += 1


def build_from_file(data: bytes) -> None:
    """A file with a right digest, as a broken writer makes it: what is read can be built."""
    header = struct.unpack_from("<Q", WRITTEN, 44)[0]
    sealed = data[: BODY_END - BODY_AT]
    sizes = min(header, len(sealed)), max(len(sealed) - header, 0), len(data) - len(sealed)
    rest = WRITTEN[40:44] + struct.pack("<QQQ", *sizes) + sealed
    try:
        blueprints = decode_blueprints(WRITTEN[:8] + hashlib.sha256(rest).digest() + rest + data[len(sealed) :])
        assert {hashlib.sha256(code).hexdigest() for code in blueprints.images.values()} == set(blueprints.images)
    except StateError:
        return
    used_ranges(blueprints)
    for graph in blueprints.graphs:
        assert is_right(blueprints, graph)
        RecordingDriver(blueprints).build(graph)


def corners() -> list[bytes]:
    """Tables that are right and wrong by one, in every number that refers to something."""
    nodes, end, count = NodeTable.of(GRAPH.nodes).data, len(GRAPH.blob), len(GRAPH.nodes)
    references = [0, 1, 2, 3, count - 1, count, 0xFFFF, 1 << 31, (1 << 32) - 1]
    edges = [Edge(at, 0, bytes(8)) for at in references] + [Edge(0, at, bytes(8)) for at in references]
    relocations = [(0, at, 0, 0) for at in references] + [(0, 0, at, 0) for at in (4096, 4097, (1 << 64) - 1)]
    rows = []
    for node in GRAPH.nodes:
        rows += [node._replace(kernel=at) for at in (-(1 << 31), -2, -1, 0, 1, 2, 3, 0x7FFFFFFF)]
        rows += [node._replace(attributes=at) for at in (1, 2, 3, 0xFFFF)]
        rows += [node._replace(kind=kind) for kind in (0, 1, 2, 3, 4, 5, 6, 0xFFFF)]
    for at in (0, 1, end - 128, end - 127, end - 8, end - 7, end, end + 1, 0x7FFFFFFF, (1 << 32) - 8, (1 << 32) - 1):
        relocations += [(at, 0, 4096, is_map) for is_map in (0, 1, 2)]
        for node in GRAPH.nodes:
            sizes = {0, node.size, max(node.size, 1) - 1, (end - at) % (1 << 32), (1 << 32) - 1}
            rows += [node._replace(start=at, size=size) for size in sizes]
    return [
        *(packed(NodeTable.of((row,)).data, b"", b"", GRAPH.blob) for row in rows),
        *(packed(nodes, EdgeTable.of((edge,)).data, b"", GRAPH.blob) for edge in edges),
        *(packed(nodes, b"", RelocationTable.ROW.pack(*row), GRAPH.blob) for row in relocations),
    ]


CODE = b"kernels"
WRITTEN = encode_blueprints(replace(WHOLE, images={hashlib.sha256(CODE).hexdigest(): CODE}))
BODY_END = BODY_AT + sum(struct.unpack_from("<QQ", WRITTEN, 44))

if __name__ == "__main__":
    compiled_graphs.LIBRARY = Path(sys.argv[1])
    whole = NodeTable.of(GRAPH.nodes).data, EdgeTable.of(GRAPH.edges).data, RelocationTable.of(GRAPH.relocations).data
    seeds = [packed(*whole, GRAPH.blob), packed(b"", b"", b"", b""), packed(*whole, GRAPH.blob[:-1])]
    for one in seeds + corners():
        build_from_tables(one)
    fuzz(st.binary(max_size=400), build_from_tables, seeds)
    assert built, "some of them are right"
    fuzz(st.binary(max_size=100), build_from_file, [WRITTEN[BODY_AT:]])
