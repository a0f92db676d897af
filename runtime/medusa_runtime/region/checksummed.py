"""A region that other machines read: its index, and which chunks are there, each with the checksum it came with.

The node server uses it to send chunks to peers.
"""

from __future__ import annotations

import functools
import mmap
import os
from contextlib import ExitStack

from ..checkpoint.index import Shard, WeightIndex
from ..errors import StorageError
from ..storage.compiled_chunks import ChunkPointers, SendJob
from ..storage.framing import files_for_peers, is_sent_to_peers, pack_index
from .chunks import Chunks
from .demand import demand
from .layout import HEADER_BYTES, TABLE_OFFSET, State, Word, reopen
from .lock import is_locked
from .pages import address_of
from .reader import Region
from .wake import wait_for_change

_LAID_OUT_S = 1.0


class ChecksummedRegion:
    """A reader's view of a laid-out region with checksums, without its data. It owns ``region``."""

    def __init__(self, region: Region) -> None:
        """Raises StorageError if the region is not laid out within a second, has failed, or has no checksums."""
        self._region = region
        with ExitStack() as opened:
            opened.callback(region.close)
            try:
                self.index: WeightIndex = region.wait_index(_LAID_OUT_S)
            except TimeoutError:
                raise StorageError(f"the region was not laid out within {_LAID_OUT_S:g} s") from None
            # One mapping of everything in front of the data, read-only.
            descriptor = reopen(region.fd, os.O_RDONLY)
            self.file = opened.enter_context(open(descriptor, "rb", buffering=0))
            self._map_front(descriptor)
            opened.pop_all()

    def _map_front(self, descriptor: int) -> None:
        with mmap.mmap(descriptor, HEADER_BYTES, prot=mmap.PROT_READ) as header:
            words = memoryview(header).cast("Q")
            self._data_offset, sums = words[Word.DATA_OFFSET], words[Word.CHECKSUMS_OFFSET]
            self._sums_offset = sums
            self.chunk_bytes, self.index_checksum = words[Word.CHUNK_BYTES], words[Word.INDEX_CHECKSUM]
            words.release()
        self.chunks = Chunks(self.index, self.chunk_bytes)
        if not sums or any(shard.path is not None for shard in self.index.shards):
            raise StorageError("this region was not made for peers: it has no checksums")
        self._map = mmap.mmap(descriptor, self._data_offset, prot=mmap.PROT_READ)
        memory = memoryview(self._map)
        self._words = memory[:HEADER_BYTES].cast("Q")
        self._address = address_of(memory)
        self._table = memory[TABLE_OFFSET : TABLE_OFFSET + self.chunks.count]
        self._sums = memory[sums : sums + 8 * self.chunks.count].cast("Q")
        self._shards = {shard.name: (number, shard) for number, shard in enumerate(self.index.shards)}

    @property
    def state(self) -> State:
        return State(self._words[Word.STATE])

    @property
    def fetched_bytes(self) -> int:
        return int(self._words[Word.FETCHED_BYTES])

    @property
    def received_bytes(self) -> int:
        """The bytes that have come, including those of unfinished chunks and of hedges (second requests)."""
        return max(int(self._words[Word.RECEIVED_BYTES]), self.fetched_bytes)

    @property
    def total_bytes(self) -> int:
        return int(self._words[Word.TOTAL_BYTES])

    @property
    def times_ns(self) -> tuple[int, int, int]:
        """When the fetch began, had its first chunk, and ended, as ``time.monotonic_ns``; 0 for a time to come."""
        return self._words[Word.STARTED_NS], self._words[Word.FIRST_NS], self._words[Word.ENDED_NS]

    @property
    def is_live(self) -> bool:
        """Whether the region is complete, or a prefetcher is filling it. Costs a system call."""
        state = self.state
        return state == State.DONE or (state == State.INDEXED and is_locked(self._region.fd))

    @functools.cached_property
    def packed_index(self) -> bytes:
        """The index and the files that are sent to peers with it, in the format of ``framing.pack_index``."""
        names = [name for name in self._region.file_names() if is_sent_to_peers(name)]
        files = files_for_peers({name: body for name in names if (body := self._region.file(name, 0.0)) is not None})
        return pack_index(self.index.to_json(), files)

    def shard(self, name: str) -> tuple[int, Shard] | None:
        """Return the number of the shard of this name, and the shard; None if there is none."""
        return self._shards.get(name)

    def has(self, chunk: int) -> bool:
        """Return whether a chunk is there."""
        return bool(self._table[chunk])

    def present(self, chunk: int, most: int) -> int:
        """Return how many chunks from ``chunk`` on are there without a gap, at most ``most``."""
        table = bytes(self._table[chunk : chunk + most])
        missing = table.find(0)
        return len(table) if missing < 0 else missing

    def wait_for_more(self, fetched_bytes: int, timeout_s: float) -> None:
        """Sleep until the region has more than ``fetched_bytes``, at most for ``timeout_s``. May return early."""
        wait_for_change(self._address + 8 * Word.FETCHED_BYTES, fetched_bytes, timeout_s)

    def demand(self, chunk: int) -> None:
        """Ask the prefetcher to fetch a chunk before others, because a peer waits for it."""
        demand(self._region.request_fd, [chunk])

    def checksum(self, chunk: int) -> int:
        """Return the checksum of a chunk that is there."""
        return int(self._sums[chunk])

    def send_job(self, chunks: range) -> SendJob:
        """Return the argument of ``CompiledChunks.send`` for neighbouring chunks of one shard."""
        pointers = ChunkPointers(
            count=len(chunks),
            bytes=self.chunk_bytes,
            last_bytes=self.chunks.size(chunks.stop - 1),
            table=self._address + TABLE_OFFSET + chunks.start,
            checksums=self._address + self._sums_offset + 8 * chunks.start,
            fetched=self._address + 8 * Word.FETCHED_BYTES,
        )
        return SendJob(chunks=pointers, offset=self.offset(chunks.start), file=self.file.fileno())

    def offset(self, chunk: int) -> int:
        """Return where a chunk begins in the region's file."""
        shard, start, _ = self.chunks.shard_range(chunk)
        return int(self._data_offset + self.index.shards[shard].offset + start)

    def close(self) -> None:
        """Close the region and everything that was opened for it. May be called twice."""
        self.file.close()
        for view in (self._words, self._table, self._sums):
            view.release()
        self._map.close()
        self._region.close()


__all__ = ["ChecksummedRegion"]
