"""Pull shards that are local files into the page cache, in execution order. Readers map them in place."""

from __future__ import annotations

import errno
import mmap
import os

from ..checkpoint.checksums import Checksums
from ..checkpoint.index import Shard, WeightIndex
from ..errors import CorruptError, ObjectChangedError, StorageError
from ..region.pages import MADV_POPULATE_READ
from ..region.writer import RegionWriter
from ..storage.local import LocalStore, file_version
from .schedule import Schedule


class _File:
    """An open shard and its mapping."""

    def __init__(self, shard: Shard, store: LocalStore) -> None:
        self._shard = shard
        self._store = store
        self._fd = store.descriptor(shard.name)
        try:
            self.check()
            self._map = mmap.mmap(self._fd, shard.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            os.close(self._fd)
            raise

    def check(self) -> None:
        """Raise ObjectChangedError if the file was replaced or written to after it was indexed."""
        try:
            found = self._store.stat(self._shard.name).version
            same = found == self._shard.version == file_version(os.fstat(self._fd))
        except (OSError, StorageError):
            same = False
        if not same:
            raise ObjectChangedError(f"{self._shard.path} was replaced or written to while it was read; start again")

    def pull(self, start: int, stop: int) -> None:
        """Read bytes [start, stop) of the data section into the page cache."""
        begin, size = self._shard.data_start + start, stop - start
        page = begin - begin % mmap.PAGESIZE
        try:
            self._map.madvise(MADV_POPULATE_READ, page, size + begin - page)
        except OSError as error:
            if error.errno == errno.EINVAL:  # before Linux 5.14, reading can be started but not awaited
                os.posix_fadvise(self._fd, begin, size, os.POSIX_FADV_WILLNEED)
                return
            self.check()
            raise CorruptError(f"{self._shard.path}: bytes {begin} to {begin + size} cannot be read: {error}") from None

    def view(self, start: int, stop: int) -> memoryview:
        return memoryview(self._map)[self._shard.data_start + start : self._shard.data_start + stop]

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)


def warm_page_cache(writer: RegionWriter, index: WeightIndex, checksums: Checksums | None, store: LocalStore) -> None:
    """Publish every chunk as soon as it is in the page cache."""
    chunks = writer.chunks
    files: dict[int, _File] = {}
    try:
        for number, shard in enumerate(index.shards):
            if shard.data_bytes:
                files[number] = _File(shard, store)
        schedule = Schedule(writer)
        while (span := schedule.take(1)) is not None:
            for chunk in span.chunks:
                place, start, stop = chunks.shard_range(chunk)
                files[place].pull(start, stop)
                if checksums:
                    with files[place].view(start, stop) as data:
                        if not checksums.matches(chunk, data):
                            raise CorruptError(
                                f"{index.shards[place].path}: the checksum of bytes {start} to {stop} is wrong"
                            )
                writer.publish(chunk)
        for file in files.values():
            file.check()
    finally:
        for file in files.values():
            file.close()
