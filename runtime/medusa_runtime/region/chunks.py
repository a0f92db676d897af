"""The chunks of a checkpoint: the units of progress, of the region's table and of checksums."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from ..checkpoint.index import WeightIndex

_SMALLEST_BYTES = 1 << 20
_LARGEST_BYTES = 8 << 20
_MOST = 8192


class ShardRange(NamedTuple):
    """Bytes [start, stop) of a shard's data section."""

    shard: int
    start: int
    stop: int


def chunk_bytes_for(index: WeightIndex, smallest_bytes: int = _SMALLEST_BYTES, most: int = _MOST) -> int:
    """Return the size of a checkpoint's chunks: ``smallest_bytes``, or more if there would be over ``most`` chunks.

    The default is 1 MiB: a layer of a small model is not much larger. The largest size is 8 MiB.
    """
    size = smallest_bytes
    while size < _LARGEST_BYTES and index.total_bytes > size * most:
        size *= 2
    return size


class Chunks:
    """The chunks of an index, numbered shard by shard. The last chunk of a shard may be shorter than others."""

    def __init__(self, index: WeightIndex, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._index = index
        self._firsts: list[int] = []
        self._short: dict[int, int] = {}  # the sizes of short chunks
        self.count = 0
        for shard in index.shards:
            self._firsts.append(self.count)
            self.count += -(-shard.data_bytes // chunk_bytes)
            if short := shard.data_bytes % chunk_bytes:
                self._short[self.count - 1] = short

    def covering(self, shard: int, start: int, stop: int) -> range:
        """Return the chunks that hold bytes [start, stop) of a shard's data section."""
        if start >= stop:
            return range(0)
        first = self._firsts[shard]
        return range(first + start // self.chunk_bytes, first + (stop - 1) // self.chunk_bytes + 1)

    def of_tensor(self, name: str) -> range:
        entry = self._index.tensors[name]
        return self.covering(entry.shard, entry.start, entry.stop)

    def size(self, chunk: int) -> int:
        """Return the size of a chunk in bytes."""
        return self._short.get(chunk, self.chunk_bytes)

    def shard_range(self, chunk: int) -> ShardRange:
        # Shards without data share their first number with the next one; the last of them holds the chunk.
        shard = bisect_right(self._firsts, chunk) - 1
        start = (chunk - self._firsts[shard]) * self.chunk_bytes
        return ShardRange(shard, start, start + self.size(chunk))

    def order(self) -> list[int]:
        """Return all chunks that hold tensors, in the order in which the execution order first needs them."""
        seen: dict[int, None] = {}
        for name in self._index.order:
            for chunk in self.of_tensor(name):
                seen[chunk] = None
        return list(seen)
