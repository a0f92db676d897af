"""A region's writer, which fills it. There is one at a time, and another can continue when it is killed."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..checkpoint.index import WeightIndex
from ..errors import MedusaError, ObjectChangedError, StorageError
from .chunks import Chunks
from .demand import DemandRings
from .late_files import LateFiles
from .layout import ERROR_BYTES, ERROR_OFFSET, TABLE_OFFSET, State, Word, reopen
from .lock import lock, unlock
from .memory import WriterMemory
from .plan import RegionPlan
from .seals import seal_for_good, seal_to_others
from .wake import wake_all

if TYPE_CHECKING:
    from ..storage.compiled_chunks import ChunkPointers, CompiledChunks, ReceiveTarget


class RegionWriter:
    """Lays a region out, hands out the memory of its chunks, and publishes them. ``publish`` is thread-safe.

    ``demand`` holds the readers' requests. ``index``, ``chunks`` and ``late_files`` exist once the region is laid out.
    """

    index: WeightIndex
    chunks: Chunks
    late_files: LateFiles

    def __init__(self, fd: int) -> None:
        """Take the region's lock. Raises StorageError if another writer has it."""
        self._fd = reopen(fd, os.O_RDWR)
        if not lock(self._fd):
            os.close(self._fd)
            raise StorageError("another prefetcher is filling this region; expected to be the only one")
        try:
            self._memory = WriterMemory(self._fd)
        except BaseException:  # the lock would keep others out
            os.close(self._fd)
            raise
        self.demand = DemandRings(self._memory)
        self._publishing = threading.Lock()
        self._order: list[int] = []
        self._rank = 0  # how many chunks of the order are there without a gap; the watermark counts their bytes
        self._sealed_early = False
        self._compiled: CompiledChunks | None = None

    @property
    def direct(self) -> bool:
        """Whether to receive bytes straight into ``buffer``. Otherwise ``write`` is cheaper.

        Receiving into a page that does not exist yet costs a fault and a page of zeros. A write costs neither.
        """
        return self._sealed_early or self._memory.reserved_bytes >= self._memory.words[Word.REGION_BYTES] > 0

    @property
    def state(self) -> State:
        return State(self._memory.words[Word.STATE])

    @property
    def reserved_bytes(self) -> int:
        """The size for which ``reserve`` has allocated pages."""
        return self._memory.reserved_bytes

    def reserve(self, size_bytes: int) -> None:
        """Allocate memory, before ``lay_out``, for a checkpoint of about this size that will be fetched."""
        if not self._memory.words[Word.REGION_BYTES]:
            self._memory.reserve(size_bytes)

    def lay_out(
        self,
        index: WeightIndex,
        files: Mapping[str, bytes],
        late_sizes: Mapping[str, int] | None = None,
        peer_chunk_bytes: int | None = None,
    ) -> WeightIndex:
        """Lay out the region, let readers in, and return the index that they see.

        ``late_sizes`` has the sizes of late files, in bytes. ``peer_chunk_bytes`` is given if other machines read the
        region: it is the size of the chunks, and each of them is then published with its checksum.

        If an earlier writer has laid out the region for the same versions, it is continued, and what was published
        stays. Raises ObjectChangedError if the versions differ, since readers may already have used the old ones.
        """
        if self._memory.words[Word.REGION_BYTES]:
            self.chunks = self._continue(index)
        else:
            self.chunks = self._begin(index, files, late_sizes or {}, peer_chunk_bytes)
        self.late_files = LateFiles(self._memory)
        if self.has_checksums:
            from ..storage.compiled_chunks import compiled_functions  # only for nodes of a cluster

            self._compiled = compiled_functions()
        words = self._memory.words
        self._order = self.chunks.order()
        words[Word.TOTAL_BYTES] = sum(map(self.chunks.size, self._order))
        kept_bytes = sum(self.chunks.size(chunk) for chunk in self._order if self.present(chunk))
        words[Word.FETCHED_BYTES] = words[Word.KEPT_BYTES] = words[Word.RECEIVED_BYTES] = kept_bytes
        words[Word.GENERATION] += 1
        words[Word.ENDED_NS] = words[Word.FIRST_NS] = 0
        words[Word.STARTED_NS] = time.monotonic_ns()
        self._raise_watermark()
        words[Word.STATE] = State.INDEXED
        return self.index

    def _begin(
        self,
        index: WeightIndex,
        files: Mapping[str, bytes],
        late_sizes: Mapping[str, int],
        peer_chunk_bytes: int | None,
    ) -> Chunks:
        plan = RegionPlan.of(index, files, late_sizes, peer_chunk_bytes)
        self._memory.grow(plan.size_bytes)
        memory, words = self._memory.bytes, self._memory.words
        memory[plan.index_offset : plan.index_offset + len(plan.index_text)] = plan.index_text
        for name, body in files.items():
            start, length = plan.places[name]
            memory[start : start + length] = body
        memory[plan.directory_offset : plan.directory_offset + len(plan.directory)] = plan.directory
        words[Word.INDEX_OFFSET], words[Word.INDEX_BYTES] = plan.index_offset, len(plan.index_text)
        words[Word.FILES_OFFSET], words[Word.FILES_BYTES] = plan.directory_offset, len(plan.directory)
        words[Word.DATA_OFFSET] = plan.data_offset
        words[Word.CHUNK_BYTES], words[Word.CHUNK_COUNT] = plan.chunks.chunk_bytes, plan.chunks.count
        words[Word.TOTAL_BYTES] = index.total_bytes
        words[Word.CHECKSUMS_OFFSET] = plan.checksums_offset
        if peer_chunk_bytes:
            from ..storage.framing import checksum_of_index  # only for nodes of a cluster

            words[Word.INDEX_CHECKSUM] = checksum_of_index(plan.index_text, files)
        words[Word.REGION_BYTES] = plan.size_bytes  # last, because it says that the layout is complete
        self.index = index
        return plan.chunks

    def _continue(self, index: WeightIndex) -> Chunks:
        self._memory.remap(self._memory.words[Word.REGION_BYTES])
        memory, words = self._memory.bytes, self._memory.words
        start = words[Word.INDEX_OFFSET]
        found = WeightIndex.from_json(bytes(memory[start : start + words[Word.INDEX_BYTES]]))
        if found.shards != index.shards or found.tensors != index.tensors:  # the order may be a recorded one or not
            changed = [old.name for old, new in zip(found.shards, index.shards, strict=False) if old != new]
            raise ObjectChangedError(
                f"the checkpoint changed while it was read: expected the version that was begun, "
                f"found another one of {', '.join(changed) or 'its files'}; start again"
            )
        self.index = found
        return Chunks(found, words[Word.CHUNK_BYTES])

    @property
    def has_checksums(self) -> bool:
        """Whether chunks are published with their checksums (xxh3-64), for other machines."""
        return bool(self._memory.words[Word.CHECKSUMS_OFFSET])

    def present(self, chunk: int) -> bool:
        """Return whether a chunk is published."""
        return self._memory.bytes[TABLE_OFFSET + chunk] == 1

    def pending(self) -> list[int]:
        """Return the chunks that are not there yet, in the order in which they should be fetched."""
        return [chunk for chunk in self._order if not self.present(chunk)]

    @property
    def complete(self) -> bool:
        """Whether every chunk is there."""
        return self._rank == len(self._order)

    def demanded(self) -> list[range]:
        """Return the chunks that forwards wait for. Some of them may be there by now."""
        return self.demand.demanded(self.chunks.count)

    def hinted(self) -> list[int]:
        """Return the chunks that readers have hinted at."""
        return self.demand.hinted(self.chunks.count)

    @property
    def fetched_bytes(self) -> int:
        """The number of bytes that have come."""
        return int(self._memory.words[Word.FETCHED_BYTES])

    @property
    def released_bytes(self) -> int:
        """The number of bytes that the reader has released."""
        return int(self._memory.words[Word.RELEASED_BYTES])

    def buffer(self, chunk: int, count: int = 1) -> memoryview:
        """Return the memory of ``count`` neighbouring chunks of one shard. Release the view before ``finish``."""
        stop = self.chunks.shard_range(chunk + count - 1).stop
        start = self._offset(chunk)
        return self._memory.bytes[start : start + stop - self.chunks.shard_range(chunk).start]

    def prepare(self, chunk: int) -> None:
        """Allocate the pages of a chunk that is about to be received straight into its ``buffer``."""
        self._memory.prepare(self._offset(chunk), self.chunks.size(chunk))

    def write(self, chunk: int, offset: int, data: memoryview) -> None:
        """Copy ``data`` into a chunk, at ``offset`` bytes from its start. It may go on into the next chunks."""
        at = self._offset(chunk) + offset
        if self._sealed_early:  # only the mapping, which was made before, can still be written to
            self._memory.bytes[at : at + len(data)] = data
            return
        while data:
            count = os.pwrite(self._fd, data, at)
            data, at = data[count:], at + count

    def _offset(self, chunk: int) -> int:
        """Return where a chunk begins in the region."""
        shard, start, _ = self.chunks.shard_range(chunk)
        return self._memory.words[Word.DATA_OFFSET] + self.index.shards[shard].offset + start

    def publish(self, chunk: int, checksum: int | None = None) -> None:
        """Let readers have a chunk whose bytes are complete. In a region with checksums, ``checksum`` is needed."""
        with self._publishing:  # also a memory barrier: CPUs that reorder stores must store the bytes before the mark
            if self.present(chunk):
                return
            if checksum is not None and self._compiled is not None:
                # Compiled code also publishes in other threads, and only it adds up the bytes atomically.
                self._compiled.publish(self._chunk_pointers(range(chunk, chunk + 1)), 0, checksum)
            else:
                self._mark(chunk, checksum)
            self._raise_watermark()

    def _mark(self, chunk: int, checksum: int | None) -> None:
        words = self._memory.words
        if checksum is not None:
            self._memory.words_at(words[Word.CHECKSUMS_OFFSET] + 8 * chunk)[0] = checksum
        self._memory.bytes[TABLE_OFFSET + chunk] = 1
        words[Word.FETCHED_BYTES] += self.chunks.size(chunk)
        words[Word.FIRST_NS] = words[Word.FIRST_NS] or time.monotonic_ns()
        if checksum is not None:  # peers may wait for it
            wake_all(self._memory.address + 8 * Word.FETCHED_BYTES)

    def count_received(self, count: int) -> None:
        """Count bytes that have come, also for unfinished chunks. Only one thread at a time may call this."""
        self._memory.words[Word.RECEIVED_BYTES] += count

    def count_retry(self) -> None:
        """Count a request to the store that is tried again. Only one thread at a time may call this."""
        self._memory.words[Word.RETRIES] += 1

    def raise_watermark(self) -> None:
        """Raise the watermark over chunks that compiled code has published."""
        with self._publishing:
            self._raise_watermark()

    def receive_target(self, key: str, start: int, stop: int) -> ReceiveTarget | None:
        """Return where bytes [start, stop) of the file ``key`` are in the region; None if compiled code cannot be used.

        They must be whole chunks. Compiled code publishes them without this writer, so call ``raise_watermark``
        afterwards.
        """
        from ..storage.compiled_chunks import ReceiveTarget

        if self._compiled is None:
            return None
        shard = next(number for number, shard in enumerate(self.index.shards) if shard.name == key)
        data_start = self.index.shards[shard].data_start
        chunks = self.chunks.covering(shard, start - data_start, stop - data_start)
        at = self._offset(chunks.start)
        populate = at + stop - start > self._memory.reserved_bytes
        return ReceiveTarget(self._chunk_pointers(chunks), self._memory.address + at, populate=populate)

    def _chunk_pointers(self, chunks: range) -> ChunkPointers:
        address = self._memory.address
        from ..storage.compiled_chunks import ChunkPointers

        return ChunkPointers(
            count=len(chunks),
            bytes=self.chunks.chunk_bytes,
            last_bytes=self.chunks.size(chunks.stop - 1),
            table=address + TABLE_OFFSET + chunks.start,
            checksums=address + self._memory.words[Word.CHECKSUMS_OFFSET] + 8 * chunks.start,
            fetched=address + 8 * Word.FETCHED_BYTES,
            first_ns=address + 8 * Word.FIRST_NS,
        )

    def _raise_watermark(self) -> None:
        words = self._memory.words
        mark, begun = words[Word.WATERMARK] if self._rank else 0, self._rank
        while self._rank < len(self._order) and self.present(self._order[self._rank]):
            mark += self.chunks.size(self._order[self._rank])
            self._rank += 1
        if self._rank != begun:
            words[Word.WATERMARK] = mark

    def seal_early(self) -> None:
        """Seal before the data is complete: from now on, only this writer can change the region.

        The node agent does this to regions that it hands to untrusted readers. No other writer can continue such a
        region.
        """
        self._shorten()
        seal_to_others(self._fd)
        self._sealed_early = True

    def finish(self, *, seal: bool = True) -> None:
        """Set the state to DONE, now that all chunks are published, and seal the region.

        Without ``seal``, its single reader can still free memory.
        """
        missing = self.pending()
        assert not missing, f"{len(missing)} chunks are missing"
        self._memory.words[Word.ENDED_NS] = time.monotonic_ns()
        self._memory.words[Word.STATE] = State.DONE
        if seal:
            self.seal()
        else:
            self.close()

    def seal(self) -> None:
        """Close the writer of a region that is DONE, and seal the region."""
        self._shorten()
        fd = os.dup(self._fd)
        try:
            self.close()
            seal_for_good(fd)
        finally:
            os.close(fd)

    def _shorten(self) -> None:
        """Free reserved memory that the checkpoint does not need."""
        size_bytes = self._memory.words[Word.REGION_BYTES]
        if os.fstat(self._fd).st_size > size_bytes > 0:
            os.ftruncate(self._fd, size_bytes)

    def fail(self, error: MedusaError) -> None:
        """Set the state to FAILED. Every reader that waits raises this error."""
        if self._fd < 0 or self.state == State.DONE:
            return
        message = str(error)
        while len(text := json.dumps([error.code, message]).encode()) > ERROR_BYTES:
            message = message[: len(message) * 2 // 3] + "…"
        with self._publishing:
            self._memory.bytes[ERROR_OFFSET : ERROR_OFFSET + len(text)] = text
            self._memory.words[Word.ERROR_BYTES] = len(text)
            self._memory.words[Word.ENDED_NS] = time.monotonic_ns()
            self._memory.words[Word.STATE] = State.FAILED

    def close(self) -> None:
        """Stop being the region's writer. May be called twice."""
        if self._fd < 0:
            return
        unlock(self._fd)  # explicitly, because a remaining mapping would keep the lock
        self._memory.close()
        os.close(self._fd)
        self._fd = -1


__all__ = ["RegionWriter"]
