"""The format in which a node sends an index and chunks to its peers.

Each chunk follows a frame of 16 bytes, little-endian: the chunk's size (4 bytes), padding (4), and its xxh3-64 (8).
"""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import quote

from ..errors import MissingPackageError

CHECKSUM_HEADER, CHUNK_BYTES_HEADER = "Medusa-Checksum", "Medusa-Chunk-Bytes"
READER_HEADER = "Medusa-Reader"  # identifies one fetch, whose requests are answered one after the other
# The sizes that chunks of a region for peers may have. Each node of a chain is one chunk later than the one before it,
# so these chunks are smaller than others.
PEER_CHUNK_BYTES = tuple(256 << 10 << power for power in range(6))
_FRAME = struct.Struct("<I4xQ")
FRAME_BYTES = _FRAME.size
_MOST_FILES = 256
_LENGTH_BYTES = 8
_BUNDLE = ".medusa/"
_SENT_OF_BUNDLE = (f"{_BUNDLE}manifest.json", f"{_BUNDLE}blobs/")

Checksum = Callable[[bytes | memoryview], int]


class FramingError(Exception):
    """The bytes that came are not in this format."""


class Frame(NamedTuple):
    """The frame in front of one chunk: its size in bytes and its checksum."""

    size: int
    checksum: int

    def pack(self) -> bytes:
        return _FRAME.pack(*self)

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> Frame:
        return cls(*_FRAME.unpack(data))


def framed_bytes(chunks: int, size_bytes: int) -> int:
    """Return how many bytes ``chunks`` chunks of ``size_bytes`` together take on the wire."""
    return chunks * FRAME_BYTES + size_bytes


def entity_tag_of(version: str | None) -> str:
    """Return an object's version as an ETag, whatever form the store gave it."""
    return f'"{quote(version or "", safe="")}"'


def pack_index(index_text: bytes, files: Mapping[str, bytes]) -> bytes:
    """Return an index and the checkpoint's files as one body: a length, the names and sizes as JSON, and the contents.

    The length is that of the JSON, in 8 bytes, little-endian.
    """
    sizes = {"index": len(index_text), "files": {name: len(body) for name, body in files.items()}}
    head = json.dumps(sizes).encode()
    return b"".join([len(head).to_bytes(_LENGTH_BYTES, "little"), head, index_text, *files.values()])


def parse_index(data: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Return the index's text and the files. Raises FramingError for anything that ``pack_index`` does not make."""
    at = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        if not _LENGTH_BYTES < at <= len(data):
            raise FramingError("expected the sizes of an index and files, found fewer bytes")
        sizes = json.loads(data[_LENGTH_BYTES:at])
        parts = [("", sizes["index"]), *sizes["files"].items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise FramingError("expected the sizes of an index and files, found something else") from None
    if len(parts) > _MOST_FILES:
        raise FramingError(f"expected at most {_MOST_FILES} files, found {len(parts)}")
    found: dict[str, bytes] = {}
    for name, size in parts:
        if type(size) is not int or not 0 <= size <= len(data) - at or (name in found):
            raise FramingError("expected as many bytes as are announced")
        found[name] = data[at : at + size]
        at += size
    if at != len(data):
        raise FramingError(f"expected {at} bytes, found {len(data)}")
    return found.pop(""), found


def import_xxh3_64() -> Checksum:
    """Return xxh3-64, which a core computes faster than it reads memory. MissingPackageError without its package."""
    try:
        found: Checksum = importlib.import_module("xxhash").xxh3_64_intdigest
    except ImportError:
        raise MissingPackageError(
            'weights between nodes need the package xxhash: pip install "medusa-runtime[cluster]"'
        ) from None
    return found


def is_bundle_file(name: str) -> bool:
    """Return whether this is a file of the state bundle beside a checkpoint."""
    return name.startswith(_BUNDLE)


def is_sent_to_peers(name: str) -> bool:
    """Return whether a region's file is sent to peers. An artifact that this machine has restored for itself is not."""
    return not is_bundle_file(name) or name.startswith(_SENT_OF_BUNDLE)


def files_for_peers(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files that are sent to peers, sorted by name."""
    return {name: files[name] for name in sorted(files) if is_sent_to_peers(name)}


def checksum_of_index(index_text: bytes, files: Mapping[str, bytes]) -> int:
    """Return the checksum of an index and the files that are sent to peers with it."""
    parts = [index_text, *(part for name, body in files_for_peers(files).items() for part in (name.encode(), body))]
    lengths = b"".join(len(part).to_bytes(8, "little") for part in parts)
    return import_xxh3_64()(lengths + b"".join(parts))
