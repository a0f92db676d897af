"""A checkpoint copied into a folder: all its files, each whole or not there."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from medusa_runtime.checkpoint.index import Shard
from medusa_runtime.checkpoint.reader import Checkpoint
from medusa_runtime.errors import ConfigError, StorageError
from medusa_runtime.region.reader import Progress

from .fetch import PART

_PIECE_BYTES = 8 << 20


class _Piece(NamedTuple):
    key: str
    version: str | None
    fd: int
    start: int
    stop: int


class Download:
    """A download in ``connections`` threads. ``run`` returns when the folder is complete, or raises the store's error.

    Shards are written under a name that ends in .part and renamed when all their bytes are there.
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
        self._folder.mkdir(parents=True, exist_ok=True)
        self._check_room()
        shards = self._checkpoint.index.shards
        try:
            with ExitStack() as stack:
                self._fetch_all([piece for shard in shards for piece in self._open(stack, shard)])
            for shard in shards:
                self._part(shard.name).replace(self._folder / shard.name)
        finally:
            for shard in shards:
                self._part(shard.name).unlink(missing_ok=True)
        for name, data in self._checkpoint.files.items():
            (self._folder / name).write_bytes(data)

    def _open(self, stack: ExitStack, shard: Shard) -> list[_Piece]:
        part = self._part(shard.name)
        part.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
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
        try:
            os.pwrite(piece.fd, buffer, piece.start)
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
