"""The weight index of a state bundle: tensors in the order a forward used them, and a checksum for each chunk.

A zlib-compressed JSON object: ``{"index": …, "chunk_bytes": n, "checksums": {algorithm: base64 of little-endian
64-bit words, one a chunk}}``. Several algorithms are recorded, and a reader takes the fastest that it has.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..checkpoint.archive import SUFFIXES, directory_start
from ..checkpoint.checksums import ALGORITHMS, Checksums, checksum_function
from ..checkpoint.index import Shard, WeightIndex
from ..checkpoint.reader import KnownArchive
from ..errors import CorruptError, StateError
from ..region.chunks import Chunks, chunk_bytes_for
from ..region.reader import Region


@dataclass(frozen=True, slots=True)
class RecordedIndex:
    """``versions``: what the store called each shard when the checksums were computed. ``directories``: of each PyTorch
    file where its directory begins, and that directory's sha256."""

    index: WeightIndex
    chunk_bytes: int
    checksums: dict[str, array[int]]
    directories: dict[str, tuple[int, str]] = field(default_factory=dict)

    def archive(self, name: str) -> KnownArchive | None:
        """What a PyTorch file's index would find."""
        if name not in self.directories:
            return None
        number, shard = next((n, shard) for n, shard in enumerate(self.index.shards) if shard.name == name)
        tensors = {key: entry for key, entry in self.index.tensors.items() if entry.shard == number}
        start, digest = self.directories[name]
        return KnownArchive(shard.size_bytes, start, digest, tensors)

    @property
    def versions(self) -> list[str | None]:
        return [shard.version for shard in self.index.shards]

    def verifier(self, index: WeightIndex) -> Checksums | None:
        """What verifies a fetch of ``index``, which has the same layout; None when nothing was recorded."""
        algorithm = next(
            (name for name in ALGORITHMS if name in self.checksums and checksum_function(name) is not None), None
        )
        if algorithm is None:
            return None
        same = [shard.version for shard in index.shards] == self.versions
        return Checksums(algorithm, self.chunk_bytes, self.checksums[algorithm], pinned=same)

    def to_bytes(self) -> bytes:
        document = {
            "index": json.loads(_portable(self.index).to_json()),
            "chunk_bytes": self.chunk_bytes,
            "checksums": {name: base64.b64encode(_little(values)).decode() for name, values in self.checksums.items()},
        }
        if self.directories:
            document["directories"] = self.directories
        return zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 9)

    @classmethod
    def from_bytes(cls, data: bytes) -> RecordedIndex:
        """Raises StateError when it is none."""
        try:
            document = json.loads(zlib.decompress(data))
            checksums = {}
            for name, text in document["checksums"].items():
                checksums[name] = array("Q", base64.b64decode(text))
                if sys.byteorder == "big":
                    checksums[name].byteswap()
            index = WeightIndex.from_json(json.dumps(document["index"]))
            names = {shard.name for shard in index.shards}
            found = document.get("directories", {}).items()
            directories = {name: (int(start), str(digest)) for name, (start, digest) in found if name in names}
            return cls(index, int(document["chunk_bytes"]), checksums, directories)
        except (ValueError, KeyError, TypeError, AttributeError, zlib.error, CorruptError) as error:
            raise StateError(f"expected a weight index, found something else ({error}); materialize again") from None


def record(region: Region, order: Sequence[str] | None) -> RecordedIndex:
    """The index of a filled region, in a recorded order if there is one, with its chunks' checksums by all algorithms
    there are here."""
    index = region.wait_index()
    if order is not None:
        index = index.reordered(order)
    chunks = Chunks(index, chunk_bytes_for(index))
    functions = {name: function for name in ALGORITHMS if (function := checksum_function(name)) is not None}
    checksums = {name: array("Q", bytes(8 * chunks.count)) for name in functions}
    for chunk in range(chunks.count):
        shard, start, stop = chunks.place(chunk)
        region.wait(start, stop, shard)
        with region.shard(shard)[start:stop] as data:
            for name, function in functions.items():
                checksums[name][chunk] = function(data)
    return RecordedIndex(index, chunks.chunk_bytes, checksums, _directories(region))


def _directories(region: Region) -> dict[str, tuple[int, str]]:
    return {
        shard.name: _directory(shard, region.shard(number))
        for number, shard in enumerate(region.wait_index().shards)
        if shard.name.endswith(SUFFIXES)
    }


def _directory(shard: Shard, data: memoryview) -> tuple[int, str]:
    def read(start: int, stop: int) -> bytes:
        return bytes(data[start:stop])

    start = directory_start(shard.size_bytes, read)
    return start, hashlib.sha256(data[start:]).hexdigest()


def _portable(index: WeightIndex) -> WeightIndex:
    """Without the paths of this machine."""
    shards = [shard._replace(path=None) for shard in index.shards]
    return WeightIndex(shards, index.tensors, index.order, recorded=index.recorded)


def _little(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values = array("Q", values)
        values.byteswap()
    return values.tobytes()


__all__ = ["RecordedIndex", "record"]
