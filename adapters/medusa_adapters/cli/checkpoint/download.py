"""A checkpoint copied into a folder: all its files, each whole or not there."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from medusa_runtime.checkpoint.index import Shard
from medusa_runtime.checkpoint.reader import Checkpoint
from medusa_runtime.errors import ConfigError, StorageError
from medusa_runtime.region.reader import Progress

PART = ".part"  # how the name of a file ends while it is being written
_PIECE_BYTES = 8 << 20


class _Piece(NamedTuple):
    key: str
    version: str | None
    fd: int
    start: int
    stop: int


class Download:
    """A download in ``connections`` threads. ``run`` returns when the folder is complete, or raises the store's error.

    All files are written under a name that ends in .part, and renamed when all bytes of all of them are there. If it
    fails, none of them is left.
    """

    def __init__(self, checkpoint: Checkpoint, folder: Path, connections: int) -> None:
        self._checkpoint = checkpoint
        self._folder = folder
        self._connections = connections
        self._lock = threading.Lock()
        self._fetched = 0
        self._began = time.monotonic()
        self.total_bytes = sum(shard.size_bytes for shard in checkpoint.index.shards)

    def progress(self) -> Progress:
        elapsed = max(time.monotonic() - self._began, 1e-6)
        rate = self._fetched / elapsed
        left_s = (self.total_bytes - self._fetched) / rate if rate else None
        return Progress("fetching", self._fetched, self.total_bytes, rate / 1e6 or None, left_s, None)

    def run(self) -> None:
        made = not self._folder.exists()
        self._folder.mkdir(parents=True, exist_ok=True)
        shards, files = self._checkpoint.index.shards, self._checkpoint.files
        names = [*(shard.name for shard in shards), *files]
        try:
            self._check_room()
            with ExitStack() as stack:
                self._fetch_all([piece for shard in shards for piece in self._open(stack, shard)])
            for name, data in files.items():
                part = self._part(name)
                part.parent.mkdir(parents=True, exist_ok=True)
                with open(_create(part), "wb") as file:
                    file.write(data)
            for name in names:
                self._part(name).replace(self._folder / name)
        finally:
            for name in names:
                self._part(name).unlink(missing_ok=True)
            if made:
                with suppress(OSError):  # it is not empty
                    self._folder.rmdir()

    def _open(self, stack: ExitStack, shard: Shard) -> list[_Piece]:
        part = self._part(shard.name)
        part.parent.mkdir(parents=True, exist_ok=True)
        fd = _create(part)
        stack.callback(os.close, fd)
        starts = range(0, shard.size_bytes, _PIECE_BYTES)
        return [
            _Piece(shard.name, shard.version, fd, start, min(start + _PIECE_BYTES, shard.size_bytes))
            for start in starts
        ]

    def _fetch_all(self, pieces: list[_Piece]) -> None:
        """End with the first error, after the ranges under way have ended: they write to open files."""
        local = threading.local()
        with ThreadPoolExecutor(self._connections, "fetch") as pool:
            futures = [pool.submit(self._fetch, local, piece) for piece in pieces]
            try:
                for future in futures:
                    future.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _fetch(self, local: threading.local, piece: _Piece) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(bytearray(_PIECE_BYTES))
        buffer = local.buffer[: piece.stop - piece.start]
        self._checkpoint.store.read_into(piece.key, piece.start, buffer, piece.version)
        written = 0
        try:
            while written < len(buffer):  # a disk that becomes full takes a part of the bytes without an error
                written += os.pwrite(piece.fd, buffer[written:], piece.start + written)
        except OSError as error:
            raise StorageError(f"cannot write {self._part(piece.key)}: {error.strerror}") from error
        with self._lock:
            self._fetched += len(buffer)

    def _part(self, name: str) -> Path:
        return self._folder / f"{name}{PART}"

    def _check_room(self) -> None:
        room = os.statvfs(self._folder)
        if room.f_bavail * room.f_frsize < self.total_bytes:
            raise ConfigError(
                f"--to={str(self._folder)!r}: expected room for {self.total_bytes:,} bytes, "
                f"found {room.f_bavail * room.f_frsize:,}; choose another folder"
            )


def _create(path: Path) -> int:
    """Make an empty file, also from what a killed download left, and return its descriptor.

    Raises OSError for a link or a pipe, which another user may have put there who may write to the folder.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o644)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(fd)
        raise OSError(errno.EEXIST, f"{path.name} is a link, or no file")
    os.ftruncate(fd, 0)
    return fd
