"""A region, that is, one checkpoint's bytes in shared memory, as its readers see it.

A region is a memfd, which children inherit, or which is sent over a socket. So it needs no /dev/shm, and works for any
user.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..checkpoint.index import MOST_SHARDS_BYTES, PAGE_BYTES, Shard, TensorEntry, WeightIndex, read_shards
from ..errors import MedusaError, ObjectChangedError, StorageError, WeightsError, from_code
from ..storage.local import file_version
from .chunks import Chunks
from .demand import demand, hint, pace
from .file_range import FileRange, OpenFile
from .layout import ERROR_OFFSET, HEADER_BYTES, TABLE_OFFSET, LateFileState, State, Word, reopen
from .lock import is_locked
from .pages import address_of, drop_pages
from .waiter import Waiter
from .wake import wait_for_change

if TYPE_CHECKING:
    from ..checkpoint.divided import DividedIndex
    from .release import Release, UnreadRelease
    from .writer import RegionWriter

# How long a reader waits for a new prefetcher. A supervisor replaces a killed one within milliseconds.
_GRACE_S = 10.0
_UNMAPPED_BYTES = 64 << 10  # a smaller tensor is not worth a system call


class Progress(NamedTuple):
    """The progress of a fetch.

    ``state`` is "empty", "fetching", "done" or "failed". ``mb_per_s`` and ``eta_s``, the seconds that are left, are
    None before anything has come. ``error`` is the code and message of a failed fetch, and ``retries`` is how many
    requests to the store were tried again.
    """

    state: str
    fetched_bytes: int
    total_bytes: int
    mb_per_s: float | None
    eta_s: float | None
    error: str | None
    retries: int = 0


class Region:
    """A reader's view of a region. Each reader maps it read-only, so nothing that it does can change the weights.

    With ``private``, the mapping is writable for this reader alone: pages that it writes to are copied. This is for
    modules of unknown code. ``from_agent`` means that the region came from the node agent, whose regions may be filled
    for other users, so that no code in it may be run.
    """

    _chunks: Chunks  # set once the index is attached

    def __init__(
        self,
        fd: int,
        *,
        private: bool = False,
        demand_fd: int = -1,
        from_agent: bool = False,
        shard_fds: Sequence[int] = (),
    ) -> None:
        """Take over ``fd``, a region's memfd, and ``demand_fd``, the memfd for demands if the region is read-only.

        ``shard_fds`` are the open files of local shards, in order. Without them, each is opened by its path.
        """
        self.fd = fd
        self._shard_fds = tuple(shard_fds)
        self.demand_fd = demand_fd
        self.from_agent = from_agent
        self._flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        self._protection = mmap.PROT_READ | (mmap.PROT_WRITE if private else 0)
        self._release: Release | None = None
        self._unread: UnreadRelease | None = None
        self.viewed: set[str] = set()  # the tensors of which this process has a view
        self._header: memoryview | None = None
        self._memory: memoryview | None = None
        self._maps: list[mmap.mmap] = []
        self._index: WeightIndex | None = None
        self._parts: dict[str, TensorEntry] = {}
        self._divided: WeightIndex | None = None
        self._files: dict[str, tuple[int, ...]] = {}
        self._attached: dict[str, bytes] = {}
        self._shards: dict[int, memoryview] = {}
        self._open_files: dict[int, OpenFile] = {}
        self._no_writer_since: float | None = None

    @classmethod
    def create(cls) -> Region:
        """Create an empty region. A writer fills it later, perhaps in another process."""
        fd = os.memfd_create("medusa-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, HEADER_BYTES)
        return cls(fd)

    def writer(self) -> RegionWriter:
        """Become the writer of this region. Raises StorageError if another writer is filling it."""
        from .writer import RegionWriter

        return RegionWriter(self.fd)

    def _words(self) -> memoryview:
        if self._header is None:
            self._header = self._map(HEADER_BYTES)
        return self._header.cast("Q")

    def _map(self, size_bytes: int) -> memoryview:
        # Map a read-only file description: the mapping can then never become writable, and allows F_SEAL_WRITE. An
        # agent's region is one, and cannot be opened again if another reader (a container's root) has changed its mode.
        is_read_only = fcntl.fcntl(self.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        fd = os.dup(self.fd) if is_read_only else reopen(self.fd, os.O_RDONLY)
        try:
            flags, protection = self._flags, self._protection
            if size_bytes == HEADER_BYTES:
                flags, protection = mmap.MAP_SHARED, mmap.PROT_READ
            memory = mmap.mmap(fd, size_bytes, flags, protection)
        finally:
            os.close(fd)
        self._maps.append(memory)
        return memoryview(memory)

    def _attach(self) -> bool:
        """Map the index and the table once they are there, and return whether they are."""
        if self._index is not None:
            return True
        words = self._words()
        state = words[Word.STATE]
        if state == State.EMPTY or not words[Word.REGION_BYTES]:
            return False
        self._memory = memory = self._map(words[Word.REGION_BYTES])
        files, start = words[Word.FILES_OFFSET], words[Word.INDEX_OFFSET]
        self._files = {
            name: tuple(place)
            for name, place in json.loads(bytes(memory[files : files + words[Word.FILES_BYTES]])).items()
        }
        index = WeightIndex.from_json(bytes(memory[start : start + words[Word.INDEX_BYTES]]))
        self._chunks = Chunks(index, words[Word.CHUNK_BYTES])
        self._index = index
        return True

    def wait_index(self, timeout_s: float | None = None) -> WeightIndex:
        """Wait for the weight index and return it.

        Raises the prefetcher's error, StorageError if it died and none took over, or TimeoutError after ``timeout_s``.
        """
        waiter = Waiter(timeout_s)
        while True:
            self._raise_failure()
            if self._attach():
                assert self._index is not None
                return self._index
            if waiter.is_check_due():
                self._require_writer()
            waiter.pause()

    def name_parts(self, divided: DividedIndex) -> None:
        """Let this reader ask for parts of tensors by names of their own, like for tensors, and release them."""
        self._parts.update(divided.parts)
        self._divided = divided

    def _entry(self, name: str) -> TensorEntry:
        return self._parts.get(name) or self.wait_index().tensors[name]

    def _chunks_of(self, name: str) -> range:
        entry = self._entry(name)
        return self._chunks.covering(entry.shard, entry.start, entry.stop)

    def shards(self) -> tuple[Shard, ...]:
        """Return the shards of the index, which must be there, without reading its tensors (see ``read_shards``)."""
        words = self._words()
        return read_shards(os.pread(self.fd, min(words[Word.INDEX_BYTES], MOST_SHARDS_BYTES), words[Word.INDEX_OFFSET]))

    def file(self, name: str, timeout_s: float | None = None) -> bytes | None:
        """Return a file beside the weights, such as config.json; None if there is none of this name.

        Waits for a late file (a restored artifact). Raises like ``wait_index``.
        """
        if name in self._attached:
            return self._attached[name]
        found = self.view_file(name, timeout_s)
        return None if found is None else bytes(found)

    def view_file(self, name: str, timeout_s: float | None = None) -> memoryview | None:
        """Return a view of a file, as ``file`` returns a copy. The region stays mapped as long as there is a view.

        Attached files are not looked at. Raises TimeoutError for a late file that has not come within ``timeout_s``.
        """
        self.wait_index(timeout_s)
        assert self._memory is not None
        place = self._files.get(name)
        if place is None:
            return None
        if len(place) == 3:
            waiter = Waiter(timeout_s)
            while self._memory[place[2]] == LateFileState.PENDING:
                self._raise_failure()
                if waiter.is_check_due():
                    self._require_writer()
                waiter.pause()
            if self._memory[place[2]] == LateFileState.WITHHELD:
                return None
        return self._memory[place[0] : place[0] + place[1]].toreadonly()

    def late_bytes(self, *states: LateFileState) -> int:
        """Return the size of the late files that are in one of these states."""
        self.wait_index()
        assert self._memory is not None
        late = [(size, state) for _, size, *places in self._files.values() for state in places]
        return sum(size for size, state in late if self._memory[state] in states)

    def file_names(self) -> tuple[str, ...]:
        """Return the names of the files in the region, including late files."""
        self.wait_index()
        return tuple(self._files)

    def code(self, name: str, timeout_s: float | None = None) -> bytes | None:
        """Return a file that will be executed; None if it is not trusted, or missing.

        Trusted files were attached in this process, or fetched by this instance's own prefetcher.
        """
        if name in self._attached or not self.from_agent:
            return self.file(name, timeout_s)
        return None

    def view_code(self, name: str, timeout_s: float | None = None) -> memoryview | None:
        """Return a view of such a file, which is not copied. The region stays mapped as long as there is one."""
        if name in self._attached:
            return memoryview(self._attached[name])
        return None if self.from_agent else self.view_file(name, timeout_s)

    def has_code(self, name: str) -> bool:
        """Return, without waiting for the file, whether ``code`` finds it or may find it later."""
        self.wait_index()
        return name in self._attached or (not self.from_agent and name in self._files)

    def attach_file(self, name: str, data: bytes) -> None:
        """Add a file that only this reader sees in the region."""
        self._attached[name] = data

    @property
    def attached_files(self) -> Mapping[str, bytes]:
        """The files that ``attach_file`` has added, by name."""
        return self._attached

    def shard(self, number: int) -> memoryview:
        """Return a view of a shard's data section. Its bytes are valid only after a wait for them.

        Raises ObjectChangedError if a local file is no longer the one that was indexed.
        """
        index = self.wait_index()
        if number not in self._shards:
            shard = index.shards[number]
            if shard.path is not None:
                self._shards[number] = self._map_file(number, shard)
            else:
                assert self._memory is not None
                start = self._words()[Word.DATA_OFFSET] + shard.offset
                self._shards[number] = self._memory[start : start + shard.data_bytes]
        return self._shards[number]

    def file_range(self, name: str) -> FileRange:
        """Return where a tensor's bytes are in a file: to copy them, reading is faster than mapping untouched pages.

        Raises ObjectChangedError like ``shard``.
        """
        number, start, *_ = self._entry(name)
        shard = self.wait_index().shards[number]
        if number not in self._open_files:
            self._open_files[number] = OpenFile(os.dup(self.fd)) if shard.path is None else self._open(number, shard)
        return FileRange(self._open_files[number], self._data_start(shard) + start)

    def _map_file(self, number: int, shard: Shard) -> memoryview:
        file = self._open(number, shard)
        if not shard.data_bytes:
            return memoryview(b"")
        memory = mmap.mmap(file.fileno(), shard.size_bytes, self._flags, self._protection)
        self._maps.append(memory)
        return memoryview(memory)[shard.data_start :]

    def _open(self, number: int, shard: Shard) -> OpenFile:
        assert shard.path is not None
        try:
            opened = self._shard_fds[number] if self._shard_fds else None
            file = OpenFile(os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC) if opened is None else os.dup(opened))
        except OSError as error:
            raise ObjectChangedError(f"{shard.path} was there when it was indexed, and now: {error.strerror}") from None
        if file_version(os.fstat(file.fileno())) != shard.version:
            raise ObjectChangedError(f"{shard.path} was replaced or written to after it was indexed; start again")
        return file

    def wait(self, start: int, stop: int, shard: int, timeout_s: float | None = None) -> None:
        """Wait until bytes [start, stop) of a shard's data section are there.

        Raises the prefetcher's error, StorageError if it died and none took over, or TimeoutError.
        """
        self.wait_index(timeout_s)
        self._wait_chunks(self._chunks.covering(shard, start, stop), timeout_s)

    def wait_tensor(self, name: str, timeout_s: float | None = None) -> None:
        """Wait for all bytes of a tensor. Raises like ``wait``, and WeightsError if they were released here."""
        self.wait_index(timeout_s)
        self._check_released(name)
        self._wait_chunks(self._chunks_of(name), timeout_s)

    def _wait_chunks(self, chunks: range, timeout_s: float | None) -> None:
        if self._present(chunks):
            return
        waiter = Waiter(timeout_s)
        self._demand_released(chunks)
        while not self._present(chunks):
            self._raise_failure()
            if waiter.is_check_due():
                self._require_writer()
                self._demand_released(chunks)
            waiter.pause()

    def _demand_released(self, chunks: range) -> None:
        """Demand chunks if this reader frees memory: the fetch may have come too far, by bytes of later tensors."""
        if self._release is not None:
            demand(self.request_fd, [chunk for chunk in chunks if not self._present(range(chunk, chunk + 1))])

    def has(self, name: str) -> bool:
        """Return, without waiting, whether all bytes of a tensor are there. WeightsError if they were released here."""
        if not self._attach():
            return False
        self._check_released(name)
        return self._present(self._chunks_of(name))

    def _present(self, chunks: range) -> bool:
        if not chunks:
            return True
        assert self._memory is not None
        table = bytes(self._memory[TABLE_OFFSET + chunks.start : TABLE_OFFSET + chunks.stop])
        return table.count(1) == len(table)

    @property
    def fetched_bytes(self) -> int:
        """The number of bytes that are there. Pass it to ``wait_for_more``."""
        return self._words()[Word.FETCHED_BYTES]

    def wait_for_more(self, fetched_bytes: int, timeout_s: float) -> None:
        """Sleep until there are more than ``fetched_bytes``, at most for ``timeout_s``. May return early.

        Raises the prefetcher's error, or StorageError if it died and none took over.
        """
        self._raise_failure()
        self._require_writer()
        wait_for_change(address_of(self._words()) + 8 * Word.FETCHED_BYTES, fetched_bytes, timeout_s)

    @property
    def request_fd(self) -> int:
        """The descriptor through which this reader sends its requests; see ``demand.py``."""
        return self.fd if self.demand_fd < 0 else self.demand_fd

    def demand(self, names: Sequence[str]) -> None:
        """Ask for these tensors to be fetched before all others. Does not wait."""
        if names and self._attach():
            missing = [chunk for name in names for chunk in self._chunks_of(name)]
            demand(self.request_fd, [chunk for chunk in missing if not self._present(range(chunk, chunk + 1))])

    def hint(self, names: Sequence[str]) -> None:
        """Ask for these tensors to be fetched next, in this order, if no forward waits for others. Does not wait."""
        if self._attach():
            wanted = dict.fromkeys(chunk for name in names for chunk in self._chunks_of(name))
            missing = [chunk for chunk in wanted if not self._present(range(chunk, chunk + 1))]
            hint(self.request_fd, missing)

    def pace(self, share: float, lease_s: float) -> None:
        """Limit the fetch of what no reader waits for to a share of the link, for ``lease_s``; see ``demand.pace``."""
        pace(self.request_fd, share, lease_s)

    def release(self, name: str) -> None:
        """Free the memory of a tensor that will not be read again, in this process or another one."""
        self._releasing().tensor(name)

    def release_unread(self, names: Collection[str]) -> None:
        """Free the memory of tensors that no process will read, in the background, each once it has come."""
        from .release import UnreadRelease

        self._releasing()
        order = (self._divided or self.wait_index()).order
        self._unread = UnreadRelease(self, [name for name in order if name in names])

    def _releasing(self) -> Release:
        if self._release is None:
            from .release import Release

            self._release = Release(self.fd, self._divided or self.wait_index(), self.origin)
        return self._release

    def unmap(self, name: str) -> None:
        """Unmap a tensor that has been copied elsewhere. Reading its bytes again maps them again.

        The bytes stay in the region, or in the page cache. A tensor with a view in this process (``viewed``) is left
        alone: in a private mapping, anything written through the view would be lost.
        """
        shard, start, stop, *_ = self._entry(name)
        if name in self.viewed or stop - start < _UNMAPPED_BYTES:
            return
        address = address_of(self.shard(shard))
        begin = -(-(address + start) // PAGE_BYTES) * PAGE_BYTES
        drop_pages(begin, (address + stop) // PAGE_BYTES * PAGE_BYTES - begin)

    def check_whole(self) -> None:
        """Raise WeightsError if another process has released bytes of the region: no process can read them any more."""
        held = any(shard.path is None for shard in self.wait_index().shards)
        if held and self._release is None and self._words()[Word.RELEASED_BYTES]:
            raise WeightsError(
                "the weights were released by a process that has ended (--host-weights release); start the instance "
                "again, or keep the host's copy"
            )

    def origin(self, shard: int) -> tuple[int, int]:
        """Return where a shard's data starts in its file, the memfd or a local one, and where the file is mapped."""
        base = self._data_start(self.wait_index().shards[shard])
        return base, address_of(self.shard(shard)) - base

    def _data_start(self, shard: Shard) -> int:
        return self._words()[Word.DATA_OFFSET] + shard.offset if shard.path is None else shard.data_start

    @property
    def peak_bytes(self) -> int:
        """The most memory that the region had when ``release`` was called, without mapped files."""
        return self._release.peak_bytes if self._release else os.fstat(self.fd).st_blocks * 512

    def _check_released(self, name: str) -> None:
        if self._release is not None and name in self._release.names:
            raise WeightsError(f"tensor {name} was released after it was loaded; load it once, or without release")

    def _raise_failure(self) -> None:
        if self._words()[Word.STATE] == State.FAILED:
            raise self._failure()

    def _failure(self) -> MedusaError:
        words = self._words()
        assert self._header is not None
        code, message = json.loads(bytes(self._header[ERROR_OFFSET : ERROR_OFFSET + words[Word.ERROR_BYTES]]))
        return from_code(code, message)

    def _require_writer(self) -> None:
        """Raise StorageError if no writer has been filling this region for some time."""
        if is_locked(self.fd) or self._words()[Word.STATE] == State.DONE:
            self._no_writer_since = None
        elif self._no_writer_since is None:
            self._no_writer_since = time.monotonic()
        elif time.monotonic() - self._no_writer_since > _GRACE_S:
            raise StorageError(
                f"the prefetcher ended before the checkpoint was complete, and no other one came within {_GRACE_S:g} s"
            )

    def progress(self) -> Progress:
        """Return how far the fetch is. This takes microseconds, and never waits or raises."""
        words = self._words()
        state, fetched, total = words[Word.STATE], words[Word.FETCHED_BYTES], words[Word.TOTAL_BYTES]
        rate = eta = None
        if started := words[Word.STARTED_NS]:
            seconds = ((words[Word.ENDED_NS] or time.monotonic_ns()) - started) / 1e9
            fresh = fetched - words[Word.KEPT_BYTES]
            if fresh > 0 and seconds > 0:
                rate = fresh / seconds / 1e6
                eta = (total - fetched) / 1e6 / rate
        error = None
        if state == State.FAILED:
            failure = self._failure()
            error = f"{failure.code}: {failure}"
        name = ("empty", "fetching", "done", "failed")[state]
        return Progress(name, fetched, total, rate, eta, error, words[Word.RETRIES])

    def close(self) -> None:
        """Close the descriptors, and every mapping that is no longer in use. May be called twice."""
        if self._unread is not None:
            self._unread.close()
        self._header = self._memory = None
        self._shards.clear()
        self._open_files.clear()  # a copy that runs keeps its own
        for memory in self._maps:
            try:
                memory.close()
            except BufferError:
                pass  # tensors still point into it, and the last of them frees it
        self._maps.clear()
        for descriptor in (self.fd, self.demand_fd, *self._shard_fds):
            if descriptor >= 0:
                os.close(descriptor)
        self.fd = self.demand_fd = -1
        self._shard_fds = ()


__all__ = ["Progress", "Region"]
