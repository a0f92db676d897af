"""Blueprints as bytes are read as they were written, and wrong references are refused despite a right digest."""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import StateError
from medusa_runtime.state.graphs import Blueprints, GraphMismatch, MemoryRange, Piece, RangeKind, Reason
from medusa_runtime.state.graphs.blob_format import decode_blueprints, digest_of, encode_blueprints, save_blueprints
from medusa_runtime.state.graphs.blueprint import (
    Edge,
    GraphBlueprint,
    KernelRecord,
    Node,
    Relocation,
)
from medusa_runtime.state.graphs.kernel_images import address_of

NODE = Node(0, 1, 0, (2, 3, 4), (5, 6, 7), 8, 0, 16)
MEMSET = Node(2, 0, -1, (0, 0, 0), (0, 0, 0), 0, 16, 40)
GRAPH = GraphBlueprint(
    "decode_blueprints-1",
    (NODE, MEMSET),
    (Edge(0, 1, bytes(range(8))),),
    bytes(range(56)),
    (Relocation(0, 0, 24, False), Relocation(16, 1, 0)),
    (1,),
    (Piece(0, 4, b"in"),),
    (Piece(1, 0, b"out"),),
)
CUBIN = b"one cubin"
DIGEST = hashlib.sha256(CUBIN).hexdigest()
WHOLE = Blueprints(
    fingerprint={"gpu": "H200"},
    ranges=(
        MemoryRange("weights", RangeKind.NAMED, 1 << 40, 64),
        MemoryRange("pool", RangeKind.SLAB, 1 << 41, 64),
    ),
    kernels=(KernelRecord("scale", DIGEST, ((0, 8), (8, 4), (12, 4)), ((8, 65536),)),),
    attribute_sets=((), ((4, bytes(64)),)),
    graphs=(GRAPH,),
    images={DIGEST: CUBIN},
    contents=(Piece(1, 8, b"magic"),),
    refused={"decode_blueprints-2": "node-kind: it has a host node"},
)


def test_round_trip() -> None:
    assert decode_blueprints(encode_blueprints(WHOLE)) == WHOLE
    assert decode_blueprints(encode_blueprints(Blueprints())) == Blueprints()


def test_equal_graphs_are_stored_once() -> None:
    def size(count: int) -> int:
        large = replace(GRAPH, blob=bytes(100_000))
        return len(
            encode_blueprints(replace(WHOLE, graphs=tuple(replace(large, key=f"decode-{n}") for n in range(count))))
        )

    assert size(8) < size(1) + 10_000


def changed(**fields: Any) -> Blueprints:
    return replace(WHOLE, graphs=(replace(GRAPH, **fields),))


@pytest.mark.parametrize(
    "wrong",
    [
        changed(nodes=(NODE._replace(kernel=1), MEMSET)),
        changed(nodes=(NODE._replace(kernel=-1), MEMSET)),
        changed(nodes=(NODE._replace(attributes=2), MEMSET)),
        changed(nodes=(NODE._replace(kind=3), MEMSET)),
        changed(nodes=(NODE._replace(size=12), MEMSET)),
        changed(nodes=(NODE, MEMSET._replace(start=20))),
        changed(nodes=(NODE, MEMSET._replace(size=4))),
        changed(edges=(Edge(0, 2, bytes(8)),)),
        changed(relocations=(Relocation(49, 0, 0),)),
        changed(relocations=(Relocation(0, 2, 0),)),
        changed(relocations=(Relocation(0, 0, 0, map=True),)),
        changed(relocations=(Relocation(0, 0, 65),)),
        changed(pinned=(2,)),
        changed(inputs=(Piece(0, 63, b"in"),)),
        changed(outputs=(Piece(5, 0, b"out"),)),
        replace(WHOLE, contents=(Piece(0, 60, b"magic"),)),
        replace(WHOLE, kernels=(WHOLE.kernels[0]._replace(parameters=(((1 << 64) - 4, 8),)),)),
        replace(WHOLE, attribute_sets=((), ((4, bytes(12)),))),
        replace(WHOLE, attribute_sets=((), ((1 << 31, bytes(64)),))),
    ],
)
def test_references_to_nothing(wrong: Blueprints) -> None:
    with pytest.raises(StateError, match="malformed"):
        decode_blueprints(encode_blueprints(wrong))


POOL = MemoryRange("graph pool", RangeKind.SLAB, 0x6800_0000_0000, 4 << 20)


@pytest.mark.parametrize(
    ("pool", "why"),
    [
        (POOL._replace(address=(1 << 40) + 32), "weights and graph pool overlap at 0x10000000020"),
        (POOL._replace(address=(1 << 40) - 64, size=1 << 50), "graph pool and weights overlap at 0x10000000000"),
        (POOL._replace(size=1 << 58), "graph pool: 288230376151711744 bytes at 0x680000000000, where no device has"),
        (POOL._replace(address=(1 << 64) - (2 << 20)), "graph pool: 4194304 bytes at 0xffffffffffe00000, where no"),
        (POOL._replace(size=-1), "sizes and addresses"),
        (POOL._replace(address=1 << 64), "sizes and addresses"),
    ],
)
def test_ranges_that_cannot_be(pool: MemoryRange, why: str) -> None:
    assert decode_blueprints(encode_blueprints(replace(WHOLE, ranges=(*WHOLE.ranges, POOL)))).ranges[-1] == POOL
    with pytest.raises(StateError, match="malformed") as caught:
        decode_blueprints(encode_blueprints(replace(WHOLE, ranges=(*WHOLE.ranges, pool))))
    assert why in str(caught.value)


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa_runtime.state.graphs import blob_format

    monkeypatch.setattr(blob_format, "VERSION", 6)
    data = encode_blueprints(WHOLE)
    monkeypatch.undo()
    with pytest.raises(StateError, match="expected CUDA graphs in format 5, found 6"):
        decode_blueprints(data)


def with_image(code: bytes) -> Blueprints:
    return replace(WHOLE, images={**WHOLE.images, hashlib.sha256(code).hexdigest(): code})


def test_every_flipped_bit_is_seen() -> None:
    data = encode_blueprints(with_image(b"another, at a multiple of 16"))
    for at in range(len(data)):
        with pytest.raises(StateError, match="materialize again"):
            dict(decode_blueprints(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]).images)
    for size in range(len(data)):
        with pytest.raises(StateError, match="materialize again"):
            decode_blueprints(data[:size])
    with pytest.raises(StateError, match="materialize again"):
        decode_blueprints(data + b"\0")


def test_a_damaged_image_is_never_read(tmp_path: Path) -> None:
    data = encode_blueprints(with_image(b"damaged"))
    read = decode_blueprints(data.replace(b"damaged", b"dAmaged"))
    digest = hashlib.sha256(b"damaged").hexdigest()
    assert digest in read.images
    assert read.images[DIGEST] == CUBIN
    for _ in range(2):
        with pytest.raises(StateError, match=f"kernel image {digest[:16]} is damaged"):
            read.images[digest]
    for readers in (
        lambda: list(read.images.values()),
        lambda: encode_blueprints(read),
        lambda: save_blueprints(read, tmp_path / "bundle"),
    ):
        with pytest.raises(StateError, match="is damaged"):
            readers()
    assert not (tmp_path / "bundle").exists()


def test_images_are_read_where_they_lie() -> None:
    data = encode_blueprints(with_image(b"another"))
    images = decode_blueprints(data).images
    for digest, code in images.items():
        assert address_of(code) == address_of(data) + data.index(bytes(code)), "nothing is copied"
        assert (address_of(code) - address_of(data)) % 16 == 0
        assert hashlib.sha256(ctypes.string_at(address_of(code), len(code))).hexdigest() == digest


@pytest.mark.parametrize("sizes", [{DIGEST: 8}, {DIGEST: 10}, {DIGEST: -7}, {DIGEST: "9"}, {}, {DIGEST: 9, "": 0}, [9]])
def test_sizes_of_images_that_cannot_be(sizes: Any) -> None:
    """A digest that a broken writer has made right: each byte of a file belongs to something."""
    data = encode_blueprints(WHOLE)
    size, body, images = struct.unpack_from("<QQQ", data, 44)
    header = json.dumps(json.loads(data[68 : 68 + size]) | {"images": sizes}).encode()
    rest = data[40:44] + struct.pack("<QQQ", len(header), body, images) + header + data[68 + size : 68 + size + body]
    with pytest.raises(StateError, match="malformed"):
        decode_blueprints(data[:8] + hashlib.sha256(rest).digest() + rest + data[68 + size + body :])


def test_the_digest_tells_files_apart() -> None:
    assert digest_of(encode_blueprints(WHOLE)) == digest_of(encode_blueprints(WHOLE))
    made = [WHOLE, with_image(b"one"), with_image(b"two"), replace(WHOLE, graphs=()), changed(blob=bytes(56))]
    assert len({digest_of(encode_blueprints(one)) for one in made}) == len(made)
    for other in (b"", b"graphs", encode_blueprints(WHOLE)[:39]):
        with pytest.raises(StateError, match="expected materialized CUDA graphs, found"):
            digest_of(other)


def test_reasons_survive_as_text() -> None:
    parsed = GraphMismatch.parse(str(GraphMismatch(Reason.NODE_KIND, "it has a host node")))
    assert (parsed.reason, parsed.detail) == (Reason.NODE_KIND, "it has a host node")
    assert GraphMismatch.parse("whatever").reason == Reason.CORRUPT
