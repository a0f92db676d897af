"""The weight index in a state bundle: tensors in the order in which a forward used them, and each chunk's checksum.

It is a zlib-compressed JSON object: ``{"index": …, "chunk_bytes": n, "checksums": {algorithm: base64 of little-endian
64-bit words, one for each chunk}}``. Several algorithms are recorded, and a reader uses the fastest that it has.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint.archive import directory_start
from ..checkpoint.checksums import ALGORITHMS, Checksums, checksum_function
from ..checkpoint.index import Shard, WeightIndex
from ..checkpoint.reader import ARCHIVE_SUFFIXES, ArchiveRecord
from ..errors import CorruptError, StateError
from ..region.chunks import Chunks, chunk_bytes_for
from ..region.reader import Region
from .packed import PACKING_ERRORS, array_of, array_text, packed, unpacked

_MOST_BYTES = 64 << 20  # the largest JSON, which is enough for half a million tensors
_MOST_DIRECTORY_BYTES = 64 << 20
_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class RecordedIndex:
    """A recorded index with checksums.

    ``checksums`` has a value for each chunk, by algorithm. ``directories`` has, for each PyTorch file, the byte at
    which its directory begins and the SHA-256 of that directory.
    """

    index: WeightIndex
    chunk_bytes: int
    checksums: dict[str, array[int]]
    directories: dict[str, tuple[int, str]] = field(default_factory=dict)

    def archive(self, name: str) -> ArchiveRecord | None:
        """Return the recorded index of a PyTorch file; None if there is none."""
        if name not in self.directories:
            return None
        number, shard = next((n, shard) for n, shard in enumerate(self.index.shards) if shard.name == name)
        tensors = {key: entry for key, entry in self.index.tensors.items() if entry.shard == number}
        start, digest = self.directories[name]
        return ArchiveRecord(shard.size_bytes, start, digest, tensors)

    def checksums_for(self, index: WeightIndex) -> Checksums | None:
        """Return the checksums for a fetch of ``index``, which has the same layout; None if none can be used here."""
        algorithm = next(
            (name for name in ALGORITHMS if name in self.checksums and checksum_function(name) is not None), None
        )
        if algorithm is None:
            return None
        here, recorded = ([shard.version for shard in one.shards] for one in (index, self.index))
        return Checksums(algorithm, self.chunk_bytes, self.checksums[algorithm], pinned=here == recorded)

    def to_bytes(self) -> bytes:
        document = {
            "index": json.loads(_portable(self.index).to_json()),
            "chunk_bytes": self.chunk_bytes,
            "checksums": {name: array_text("Q", values) for name, values in self.checksums.items()},
        }
        if self.directories:
            document["directories"] = self.directories
        return packed(document)

    @classmethod
    def from_bytes(cls, data: bytes) -> RecordedIndex:
        """Parse an index. Raises StateError for any other content, and for tensors that cannot be where it says."""
        try:
            document = unpacked(data, _MOST_BYTES)
            checksums = {name: array_of("Q", text) for name, text in document["checksums"].items()}
            index = _parse_index(document["index"])
            sizes = {shard.name: shard.size_bytes for shard in index.shards}
            found = document.get("directories", {}).items()
            directories = {name: _check_directory(place, sizes[name]) for name, place in found if name in sizes}
            return cls(index, _count(document["chunk_bytes"]), checksums, directories)
        except (*PACKING_ERRORS, CorruptError) as error:
            raise StateError(f"expected a weight index, found something else ({error}); materialize again") from None


def _parse_index(document: Any) -> WeightIndex:
    """Return the index. Raises ValueError for one with a path of this machine, which only a local region may have."""
    index = WeightIndex.from_json(json.dumps(document))
    if any(shard.path is not None for shard in index.shards):
        raise ValueError("a shard with a path on this machine")
    return index


def _check_directory(place: Any, size_bytes: int) -> tuple[int, str]:
    """Check the start of a file's directory and its digest, and return them. Raises ValueError or TypeError."""
    start, digest = place
    if not size_bytes - _MOST_DIRECTORY_BYTES <= _count(start) <= size_bytes or not isinstance(digest, str):
        raise ValueError("a directory that is not at the end of its file")
    return start, digest


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"expected a number of 0 or more, found {str(value)[:40]!r}")
    return value


def record_index(region: Region, order: Sequence[str] | None) -> RecordedIndex:
    """Make the index of a filled region, with the chunks' checksums by each algorithm that is installed here.

    ``order`` is the recorded execution order, if there is one.
    """
    index = region.wait_index()
    if order is not None:
        index = index.reordered(order)
    chunks = Chunks(index, chunk_bytes_for(index))
    functions = {name: function for name in ALGORITHMS if (function := checksum_function(name)) is not None}
    checksums = {name: array("Q", bytes(8 * chunks.count)) for name in functions}
    for chunk in range(chunks.count):
        shard, start, stop = chunks.shard_range(chunk)
        region.wait(start, stop, shard)
        with region.shard(shard)[start:stop] as data:
            for name, function in functions.items():
                checksums[name][chunk] = function(data)
    return RecordedIndex(index, chunks.chunk_bytes, checksums, _directories(region))


def _directories(region: Region) -> dict[str, tuple[int, str]]:
    return {
        shard.name: _directory(shard, region.shard(number))
        for number, shard in enumerate(region.wait_index().shards)
        if shard.name.endswith(ARCHIVE_SUFFIXES)
    }


def _directory(shard: Shard, data: memoryview) -> tuple[int, str]:
    def read(start: int, stop: int) -> bytes:
        return bytes(data[start:stop])

    start = directory_start(shard.size_bytes, read)
    return start, hashlib.sha256(data[start:]).hexdigest()


def _portable(index: WeightIndex) -> WeightIndex:
    """Return the index without the paths of this machine."""
    shards = [shard._replace(path=None) for shard in index.shards]
    return WeightIndex(shards, index.tensors, index.order, recorded=index.recorded)


__all__ = ["RecordedIndex", "record_index"]
