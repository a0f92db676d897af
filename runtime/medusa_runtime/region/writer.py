"""The side of a region that fills it. One writer at a time; a killed one can be replaced by another."""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from ..checkpoint.index import PAGE_BYTES, WeightIndex
from ..errors import MedusaError, ObjectChangedError, StorageError
from .chunks import Chunks, chunk_bytes_for
from .demand import demanded, hinted, promoted
from .layout import (
    DATA_ALIGN_BYTES,
    ERROR_BYTES,
    ERROR_OFFSET,
    F_ADD_SEALS,
    HEADER_BYTES,
    SEAL_FUTURE_WRITE,
    SEAL_GROW,
    SEAL_SHRINK,
    SEAL_WRITE,
    TABLE_OFFSET,
    Late,
    State,
    Word,
    lock_for_writing,
    reopen,
    unlock,
)
from .pages import populate_write, prefer_huge


class RegionWriter:
    """Lays a region out, hands out its chunks' memory and publishes them. ``publish`` is thread-safe."""

    def __init__(self, fd: int) -> None:
        self._fd = reopen(fd, os.O_RDWR)
        if not lock_for_writing(self._fd):
            os.close(self._fd)
            raise StorageError("another prefetcher is filling this region; expected to be the only one")
        self._map = mmap.mmap(self._fd, HEADER_BYTES)
        self._memory = memoryview(self._map)
        self._words = self._memory.cast("Q")
        self._lock = threading.Lock()
        self._order: list[int] = []
        self._rank = 0  # chunks of the order that are there without a hole; the watermark counts their bytes
        self._kept = 0
        self.chunks: Chunks | None = None
        # Pages that exist already. Unmapping them takes a tenth of a fetch's time, so it is left to this object's end.
        self.reserved_bytes = 0
        self._sealed_early = False
        self._strangers: memoryview | None = None

    @property
    def direct(self) -> bool:
        """Whether bytes should be received straight into ``buffer``; else they are cheaper through ``write``.

        Where pages do not exist yet, receiving into them costs a fault and a page of zeros each, a write neither.
        """
        return self._sealed_early or self.reserved_bytes >= self._words[Word.REGION_BYTES] > 0

    @property
    def index(self) -> WeightIndex:
        """What was laid out."""
        return self._index

    @property
    def state(self) -> State:
        return State(self._words[Word.STATE])

    def lay_out(
        self, index: WeightIndex, files: Mapping[str, bytes], late: Mapping[str, int] | None = None
    ) -> WeightIndex:
        """Make the region's parts and let readers in; returns the index they have.

        ``late``: files that come later, with their sizes in bytes.

        A region that an ended writer has laid out for the same versions is continued: what it published stays.
        ObjectChangedError when the versions differ, for readers may have used the old ones already.
        """
        if self._words[Word.REGION_BYTES]:
            self._continue(index)
        else:
            self._begin(index, files, late or {})
        assert self.chunks is not None
        words = self._words
        self._order = self.chunks.order()
        self._kept = sum(self.chunks.size(chunk) for chunk in self._order if self.present(chunk))
        words[Word.TOTAL_BYTES] = sum(map(self.chunks.size, self._order))
        words[Word.FETCHED_BYTES] = words[Word.KEPT_BYTES] = self._kept
        words[Word.GENERATION] += 1
        words[Word.ENDED_NS] = 0
        words[Word.STARTED_NS] = time.monotonic_ns()
        self._raise_watermark(self.chunks)
        words[Word.STATE] = State.INDEXED
        return self._index

    def reserve(self, size_bytes: int) -> None:
        """Before ``lay_out``: map memory for a checkpoint of about this size and make its pages, ahead of time.

        For whoever knows that a fetch will come (a node's agent); faults cost more than half of a fetch's CPU time.
        """
        if not self._words[Word.REGION_BYTES] and len(self._map) < size_bytes:
            os.ftruncate(self._fd, size_bytes)
            self._remap(size_bytes)
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
            prefer_huge(address, size_bytes)
            populate_write(address, size_bytes)
            self.reserved_bytes = size_bytes

    def _begin(self, index: WeightIndex, files: Mapping[str, bytes], late: Mapping[str, int]) -> None:
        self.chunks = Chunks(index, chunk_bytes_for(index))
        text = index.to_json()
        index_offset, bodies, places, directory, data_offset, size, _ = _plan(self.chunks, text, index, files, late)
        if len(self._map) < size:
            os.ftruncate(self._fd, size)
            self._remap(size)
        memory, words = self._memory, self._words
        memory[index_offset : index_offset + len(text)] = text
        for name, body in files.items():
            memory[places[name][0] : sum(places[name])] = body
        memory[bodies : bodies + len(directory)] = directory
        words[Word.INDEX_OFFSET], words[Word.INDEX_BYTES] = index_offset, len(text)
        words[Word.FILES_OFFSET], words[Word.FILES_BYTES] = bodies, len(directory)
        words[Word.DATA_OFFSET] = data_offset
        words[Word.CHUNK_BYTES], words[Word.CHUNK_COUNT] = self.chunks.chunk_bytes, self.chunks.count
        words[Word.TOTAL_BYTES] = index.total_bytes
        words[Word.REGION_BYTES] = size  # last: it says that the layout above is complete
        self._index = index

    def layout_bytes(self, index: WeightIndex, files: Mapping[str, bytes], late: Mapping[str, int]) -> int:
        """How much memory a region of these takes when it is complete."""
        return _plan(Chunks(index, chunk_bytes_for(index)), index.to_json(), index, files, late).memory_bytes

    def _continue(self, index: WeightIndex) -> None:
        self._remap(self._words[Word.REGION_BYTES])
        start = self._words[Word.INDEX_OFFSET]
        found = WeightIndex.from_json(bytes(self._memory[start : start + self._words[Word.INDEX_BYTES]]))
        if found.shards != index.shards or found.tensors != index.tensors:  # the order may be a recorded one or not
            changed = [old.name for old, new in zip(found.shards, index.shards, strict=False) if old != new]
            raise ObjectChangedError(
                f"the checkpoint changed while it was read: expected the version that was begun, "
                f"found another one of {', '.join(changed) or 'its files'}; start again"
            )
        self._index = found
        self.chunks = Chunks(found, self._words[Word.CHUNK_BYTES])

    def late(self) -> dict[str, memoryview]:
        """The memory of the late files that are neither there nor withheld."""
        start = self._words[Word.FILES_OFFSET]
        places = json.loads(bytes(self._memory[start : start + self._words[Word.FILES_BYTES]]))
        return {
            name: self._memory[place[0] : place[0] + place[1]]
            for name, place in places.items()
            if len(place) == 3 and self._memory[place[2]] == Late.PENDING
        }

    def settle(self, name: str, state: Late) -> None:
        """Let readers have a late file whose bytes are in its memory, or tell them that it will not come."""
        start = self._words[Word.FILES_OFFSET]
        places = json.loads(bytes(self._memory[start : start + self._words[Word.FILES_BYTES]]))
        with self._lock:  # a barrier, as in publish
            self._memory[places[name][2]] = state

    def _remap(self, size: int) -> None:
        self._words.release()
        self._memory.release()
        self._map.close()
        self._map = mmap.mmap(self._fd, size)
        self._memory = memoryview(self._map)
        self._words = self._memory[:HEADER_BYTES].cast("Q")

    def present(self, chunk: int) -> bool:
        return self._memory[TABLE_OFFSET + chunk] == 1

    def pending(self) -> list[int]:
        """The chunks that are not there yet, in the order in which they should be fetched."""
        return [chunk for chunk in self._order if not self.present(chunk)]

    @property
    def complete(self) -> bool:
        """Every chunk is there."""
        return self._rank == len(self._order)

    def demanded(self) -> list[range]:
        """The chunks that readers wait for; also some that have come since."""
        assert self.chunks is not None
        runs = [*demanded(self._words), *(demanded(self._strangers) if self._strangers else ())]
        return [range(max(run.start, 0), min(run.stop, self.chunks.count)) for run in runs]

    def listen(self, demand_fd: int) -> None:
        """Also heed what readers ask for that may not write to the region; see ``asking.demand_memory``."""
        self._strangers = memoryview(mmap.mmap(demand_fd, HEADER_BYTES, prot=mmap.PROT_READ)).cast("Q")

    @property
    def promoted(self) -> bool:
        """Whether a reader waits for a region that was fetched in the background."""
        return self._strangers is not None and promoted(self._strangers)

    def hinted(self) -> list[int]:
        """The chunks that readers would like next."""
        assert self.chunks is not None
        found = [*hinted(self._words), *(hinted(self._strangers) if self._strangers else ())]
        return [chunk for chunk in found if chunk < self.chunks.count]

    @property
    def unreleased_bytes(self) -> int:
        """Bytes that have come and were not given back, where a reader does that; else 0."""
        released: int = self._words[Word.RELEASED_BYTES]
        return self._words[Word.FETCHED_BYTES] - released if released else 0

    def buffer(self, chunk: int, count: int = 1) -> memoryview:
        """The memory of ``count`` neighbouring chunks of one shard. Release it before ``finish``."""
        assert self.chunks is not None
        shard, start, _ = self.chunks.place(chunk)
        stop = self.chunks.place(chunk + count - 1).stop
        base = self._words[Word.DATA_OFFSET] + self._index.shards[shard].offset
        return self._memory[base + start : base + stop]

    def write(self, chunk: int, offset: int, data: memoryview) -> None:
        """Copy bytes to ``offset`` bytes behind a chunk's start."""
        assert self.chunks is not None
        shard, start, _ = self.chunks.place(chunk)
        at = self._words[Word.DATA_OFFSET] + self._index.shards[shard].offset + start + offset
        while data:
            count = os.pwrite(self._fd, data, at)
            data, at = data[count:], at + count

    def publish(self, chunk: int) -> None:
        """Let readers have a chunk whose bytes are complete."""
        with self._lock:  # also the barrier that puts the bytes in front of the mark on CPUs that reorder stores
            if self.chunks is None or self.present(chunk):
                return
            self._memory[TABLE_OFFSET + chunk] = 1
            self._words[Word.FETCHED_BYTES] += self.chunks.size(chunk)
            self._raise_watermark(self.chunks)

    def _raise_watermark(self, chunks: Chunks) -> None:
        mark, begun = self._words[Word.WATERMARK] if self._rank else 0, self._rank
        while self._rank < len(self._order) and self.present(self._order[self._rank]):
            mark += chunks.size(self._order[self._rank])
            self._rank += 1
        if self._rank != begun:
            self._words[Word.WATERMARK] = mark

    def seal_early(self) -> None:
        """Before the data is complete: nobody but this writer can map the region for writing from here on.

        For regions that are handed to strangers (a node's agent); no other writer can continue such a region.
        """
        fcntl.fcntl(self._fd, F_ADD_SEALS, SEAL_FUTURE_WRITE | SEAL_SHRINK | SEAL_GROW)
        self._sealed_early = True

    def finish(self, *, seal: bool = True) -> None:
        """All chunks are published: end as DONE, and make the region unchangeable for everybody.

        Without ``seal`` its one reader can give memory back.
        """
        missing = self.pending()
        assert not missing, f"{len(missing)} chunks are missing"
        self._words[Word.ENDED_NS] = time.monotonic_ns()
        self._words[Word.STATE] = State.DONE
        if seal:
            self.seal()
        else:
            self.close()

    def seal(self) -> None:
        """Give up the region and seal it, when it is DONE."""
        fd, size = os.dup(self._fd), self._words[Word.REGION_BYTES]
        try:
            self.close()
            if os.fstat(fd).st_size > size:
                os.ftruncate(fd, size)  # more was reserved than the checkpoint takes
            for seals in (SEAL_WRITE | SEAL_SHRINK | SEAL_GROW, SEAL_FUTURE_WRITE | SEAL_SHRINK | SEAL_GROW):
                try:
                    fcntl.fcntl(fd, F_ADD_SEALS, seals)
                    break
                except OSError:
                    continue  # somebody maps it for writing, or it is sealed already
        finally:
            os.close(fd)

    def fail(self, error: MedusaError) -> None:
        """End as FAILED; every reader that waits raises this error."""
        if self._fd < 0 or self.state == State.DONE:
            return
        message = str(error)
        while len(text := json.dumps([error.code, message]).encode()) > ERROR_BYTES:
            message = message[: len(message) * 2 // 3] + "…"
        with self._lock:
            self._memory[ERROR_OFFSET : ERROR_OFFSET + len(text)] = text
            self._words[Word.ERROR_BYTES] = len(text)
            self._words[Word.ENDED_NS] = time.monotonic_ns()
            self._words[Word.STATE] = State.FAILED

    def close(self) -> None:
        """Give up the region. May be called twice."""
        if self._fd < 0:
            return
        unlock(self._fd)  # a mapping that is still there would keep the lock
        self._words.release()
        self._memory.release()
        try:
            if not self.reserved_bytes:
                self._map.close()
        except BufferError:
            pass  # a thread that is ending still holds a piece
        os.close(self._fd)
        self._fd = -1


class _Plan(NamedTuple):
    """Where the parts of a region lie; ``places`` of files and the byte behind them, where their directory begins."""

    index_offset: int
    bodies: int
    places: dict[str, tuple[int, ...]]
    directory: bytes
    data_offset: int
    size: int
    memory_bytes: int  # less than the size: nothing lies between the directory and where the data is aligned to


def _plan(
    chunks: Chunks, text: bytes, index: WeightIndex, files: Mapping[str, bytes], late: Mapping[str, int]
) -> _Plan:
    index_offset = _align(TABLE_OFFSET + chunks.count, PAGE_BYTES)
    bodies = index_offset + len(text)
    places: dict[str, tuple[int, ...]] = {}
    for name, body in files.items():
        places[name] = (bodies, len(body))
        bodies += len(body)
    for name, length in late.items():
        places[name] = (bodies + 1, length, bodies)  # the byte in front of it is its state
        bodies += 1 + length
    directory = json.dumps(places).encode()
    data_offset = bodies + len(directory)
    size = _align(data_offset, PAGE_BYTES)
    memory_bytes = size + _align(index.region_bytes, PAGE_BYTES)
    if index.region_bytes:
        data_offset = _align(data_offset, DATA_ALIGN_BYTES)
        size = _align(data_offset + index.region_bytes, PAGE_BYTES)
    return _Plan(index_offset, bodies, places, directory, data_offset, size, memory_bytes)


def _align(value: int, step: int) -> int:
    return -(-value // step) * step


__all__ = ["RegionWriter"]
