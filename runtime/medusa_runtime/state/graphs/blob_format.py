"""The binary format of blueprints: a magic, a digest, a JSON header, a body to which it refers, and kernel images.

The digest is the SHA-256 of all that follows it up to the images. The header has those of the images, which are checked
one by one when they are read (``BundledImages``).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from ...errors import StateError
from .blueprint import (
    Blueprints,
    GraphBlueprint,
    KernelRecord,
    MemoryRange,
    Piece,
    RangeKind,
)
from .compiled import CompiledBundle
from .kernel_images import BundledImages, Image
from .tables import EdgeTable, NodeTable, RelocationTable

VERSION = 5
_MAGIC = b"MEDUSAG\n"
_PROLOGUE = struct.Struct("<8s32sIQQQ")  # magic, sha256, version, and the bytes of the header, the body and the rest
IDENTITY_BYTES = 40  # the magic and the digest, which is of what follows
_IMAGE_ALIGNMENT = 16  # as that of the file's own bytes in memory
_ADDRESSES = 1 << 57  # the size of the largest address space of any processor, which the device shares

Span = list[int]


class _Body:
    """A sequence of bytes to which spans refer. Equal bytes are stored once: the graphs of a model share a lot."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._known: dict[bytes, Span] = {}

    def put(self, data: bytes) -> Span:
        if data not in self._known:
            self._known[data] = [len(self.data), len(data)]
            self.data += data
        return self._known[data]

    def pieces(self, pieces: tuple[Piece, ...]) -> list[Any]:
        return [[piece.memory_range, piece.offset, *self.put(piece.data)] for piece in pieces]


def encode_blueprints(blueprints: Blueprints) -> bytes:
    body = _Body()
    header = {
        "fingerprint": blueprints.fingerprint,
        "ranges": blueprints.ranges,
        "kernels": blueprints.kernels,
        "attribute_sets": [
            [(number, value.hex()) for number, value in entries] for entries in blueprints.attribute_sets
        ],
        "images": {digest: len(data) for digest, data in blueprints.images.items()},
        "contents": body.pieces(blueprints.contents),
        "refused": blueprints.refused,
        "results": blueprints.results,
        "host": blueprints.host,
        "graphs": [_encode_graph(graph, body) for graph in blueprints.graphs],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    sealed_bytes = _PROLOGUE.size + len(text) + len(body.data)
    images: list[Image] = []
    end = sealed_bytes
    for data in blueprints.images.values():
        images += [bytes(-end % _IMAGE_ALIGNMENT), data]
        end += sum(map(len, images[-2:]))
    sealed = struct.pack("<IQQQ", VERSION, len(text), len(body.data), end - sealed_bytes) + text + body.data
    return b"".join((_MAGIC, hashlib.sha256(sealed).digest(), sealed, *images))


def _encode_graph(graph: GraphBlueprint, body: _Body) -> dict[str, Any]:
    return {
        "key": graph.key,
        "nodes": body.put(NodeTable.of(graph.nodes).data),
        "edges": body.put(EdgeTable.of(graph.edges).data),
        "blob": body.put(graph.blob),
        "relocations": body.put(RelocationTable.of(graph.relocations).data),
        "pinned": graph.pinned,
        "inputs": body.pieces(graph.inputs),
        "outputs": body.pieces(graph.outputs),
    }


def save_blueprints(blueprints: Blueprints, path: Path) -> None:
    """Write a file, whole or not at all: the process may end, and another may look for it."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(encode_blueprints(blueprints))
    part.replace(path)


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest that identifies graphs, from the first ``IDENTITY_BYTES`` of their file. ``decode`` checks it.

    It depends on every byte of the file, because the header has the images' digests. Raises StateError if the file
    contains something else.
    """
    first = bytes(data[:IDENTITY_BYTES])
    if not first.startswith(_MAGIC) or len(first) < IDENTITY_BYTES:
        raise StateError(f"expected materialized CUDA graphs, found {first[: len(_MAGIC)]!r}; materialize again")
    return first[len(_MAGIC) :].hex()


def decode_blueprints(data: bytes | memoryview) -> Blueprints:
    """Read what ``encode_blueprints`` wrote. Kernel images stay where they are, and are checked when they are read.

    Raises StateError if the bytes are damaged, cut or of another version, or if they cannot be checked because the
    compiled library is missing.
    """
    if len(data) < _PROLOGUE.size:
        raise StateError(f"expected materialized CUDA graphs, found {len(data)} bytes; materialize again")
    magic, digest, version, header_bytes, body_bytes, rest_bytes = _PROLOGUE.unpack_from(data)
    if magic != _MAGIC:
        raise StateError(f"expected materialized CUDA graphs, found {magic!r}; materialize again")
    if version != VERSION:
        raise StateError(f"expected CUDA graphs in format {VERSION}, found {version}; materialize again")
    body_at = _PROLOGUE.size + header_bytes
    end = body_at + body_bytes
    if len(data) != end + rest_bytes:
        raise StateError(f"expected {end + rest_bytes:,} bytes of CUDA graphs, found {len(data):,}; materialize again")
    view = memoryview(data)
    with ThreadPoolExecutor(1, "digest") as thread:  # hashing tens of MB takes as long as all else here
        found = thread.submit(lambda: hashlib.sha256(view[IDENTITY_BYTES:end]).digest())
        try:
            return _parse(view, body_at, end)
        finally:
            if found.result() != digest:  # then nothing else counts
                raise StateError("the sha256 of the CUDA graphs is wrong; materialize again") from None


def _parse(view: memoryview, body_at: int, end: int) -> Blueprints:
    """Read the header, and the body and the images to which it refers. Raises StateError if they are malformed."""
    try:
        header = json.loads(bytes(view[_PROLOGUE.size : body_at]))
        images = BundledImages(_split(view, end, header["images"]))
        blueprints = _Decoder(view[body_at:end]).blueprints(header, images)
        check(blueprints)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, struct.error) as error:
        raise StateError(f"the CUDA graphs are malformed ({error!r}); materialize again") from None
    return blueprints


def _split(data: memoryview, end: int, sizes: dict[str, int]) -> dict[str, memoryview]:
    """Return the images, which follow each other after ``end``. Raises ValueError unless they are all that is there."""
    images = {}
    for digest, size in sizes.items():
        _whole(size)
        start = end + -end % _IMAGE_ALIGNMENT
        if any(data[end:start]):
            raise ValueError("bytes between kernel images")
        end = start + size
        images[digest] = data[start:end]
    if end != len(data):
        raise ValueError(f"kernel images up to byte {end} of {len(data)}")
    return images


def _pairs(entries: list[Any]) -> tuple[tuple[int, int], ...]:
    return tuple((first, second) for first, second in entries)


class _Decoder:
    def __init__(self, body: memoryview) -> None:
        self._body = body

    def get(self, span: Span) -> bytes:
        start, size = span
        if start < 0 or size < 0 or start + size > len(self._body):
            raise ValueError(f"bytes {start} to {start + size} of {len(self._body)}")
        return bytes(self._body[start : start + size])

    def pieces(self, entries: list[Any]) -> tuple[Piece, ...]:
        return tuple(Piece(memory_range, offset, self.get(span)) for memory_range, offset, *span in entries)

    def graph(self, entry: dict[str, Any]) -> GraphBlueprint:
        return GraphBlueprint(
            key=entry["key"],
            nodes=NodeTable(self.get(entry["nodes"])),
            edges=EdgeTable(self.get(entry["edges"])),
            blob=self.get(entry["blob"]),
            relocations=RelocationTable(self.get(entry["relocations"])),
            pinned=tuple(entry["pinned"]),
            inputs=self.pieces(entry["inputs"]),
            outputs=self.pieces(entry["outputs"]),
        )

    def blueprints(self, header: dict[str, Any], images: BundledImages) -> Blueprints:
        return Blueprints(
            fingerprint=dict(header["fingerprint"]),
            ranges=tuple(MemoryRange(n, RangeKind(kind), a, size) for n, kind, a, size in header["ranges"]),
            kernels=tuple(
                KernelRecord(name, image, _pairs(parameters), _pairs(attributes))
                for name, image, parameters, attributes in header["kernels"]
            ),
            attribute_sets=tuple(
                tuple((number, bytes.fromhex(value)) for number, value in entries)
                for entries in header["attribute_sets"]
            ),
            graphs=tuple(map(self.graph, header["graphs"])),
            images=images,
            contents=self.pieces(header["contents"]),
            refused=dict(header["refused"]),
            results=dict(header.get("results", {})),
            host=_pairs(header.get("host", [])),
        )


def check(blueprints: Blueprints) -> None:
    """Raise ValueError unless every reference is to something that exists: a wrong one would become a wrong address."""
    _check_ranges(blueprints.ranges)
    for kernel in blueprints.kernels:
        _whole(*chain(*kernel.parameters))
        _whole(*(number for number, _ in kernel.attributes))
    _check_pieces(blueprints, blueprints.contents)
    _whole(*chain(*blueprints.host))
    compiled = CompiledBundle(blueprints)
    for graph in blueprints.graphs:
        compiled.check(graph)
        if any(memory_range not in range(len(blueprints.ranges)) for memory_range in graph.pinned):
            raise ValueError(f"a range of {graph.key}")
        _check_pieces(blueprints, (*graph.inputs, *graph.outputs))


def _check_ranges(ranges: Sequence[MemoryRange]) -> None:
    for _, _, address, size in ranges:
        _whole(address, size)
    placed = [one for one in ranges if one.kind not in (RangeKind.MODULE, RangeKind.FREE)]
    placed.sort(key=lambda one: (one.address, one.size))
    for one in placed:
        if one.address + one.size > _ADDRESSES:
            raise ValueError(f"{one.name}: {one.size} bytes at {one.address:#x}, where no device has memory")
    for one, other in pairwise(placed):
        if one.address + one.size > other.address:
            raise ValueError(f"{one.name} and {other.name} overlap at {other.address:#x}")


def _whole(*numbers: Any) -> None:
    if not all(type(number) is int and 0 <= number < 1 << 64 for number in numbers):
        raise ValueError("sizes and addresses")


def _check_pieces(blueprints: Blueprints, pieces: tuple[Piece, ...]) -> None:
    for memory_range, offset, data in pieces:
        if memory_range not in range(len(blueprints.ranges)) or offset < 0:
            raise ValueError("a piece of memory")
        if offset + len(data) > blueprints.ranges[memory_range].size:
            raise ValueError("a piece of memory")
