"""The file of requests: a path, stdin, or an object in a store, read piece by piece."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from medusa_runtime.errors import ConfigError
from medusa_runtime.storage.base import Store, open_store, redacted, scheme_of

_PIECE_BYTES = 4 << 20
_LOOK_S = 0.2
STDIN = "-"


class Source:
    """The lines of a file. ``read_bytes`` grows up to ``size_bytes``, which is None if the size is not known."""

    def __init__(self, place: str, longest_bytes: int, is_stopped: Callable[[], bool]) -> None:
        """Open the file. Raises ConfigError, StorageError and their kin.

        ``longest_bytes`` limits each line. The lines end early once ``is_stopped`` returns true.
        """
        self._is_stopped = is_stopped
        self.read_bytes = 0
        self.size_bytes: int | None = None
        self._longest_bytes = longest_bytes
        self._file: BinaryIO | None = None
        self._store: Store | None = None
        if place == STDIN:
            self._file = sys.stdin.buffer
        elif not scheme_of(place):
            try:
                # Without waiting: a pipe may have no writer yet, and a signal would not end that wait.
                number = os.open(Path(place).expanduser(), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                self._file = open(number, "rb")  # noqa: SIM115 closed in close
            except OSError as error:
                raise ConfigError(
                    f"{place}: expected a file with requests that can be read: {error.strerror}"
                ) from None
            self.size_bytes = Path(place).expanduser().stat().st_size or None
        else:
            folder, self._key = split_url(place)
            self._store = open_store(folder)
            self.size_bytes, self._version = self._store.stat(self._key)

    def lines(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield the lines that are not empty, with their numbers from 1 on. One that is too long is None."""
        rest, number, is_long = bytearray(), 0, False
        for piece in self._pieces():
            self.read_bytes += len(piece)
            start = 0
            while (end := piece.find(b"\n", start)) >= 0:
                number += 1
                line = bytes(rest) + piece[start:end]
                rest.clear()
                start = end + 1
                if is_long or len(line) > self._longest_bytes:
                    yield number, None
                elif line.strip():
                    yield number, line
                is_long = False
            rest += piece[start:]
            if len(rest) > self._longest_bytes:
                is_long = True
                rest.clear()
        if is_long:
            yield number + 1, None
        elif rest.strip():
            yield number + 1, bytes(rest)

    def _pieces(self) -> Iterator[bytes]:
        if self._file is not None:
            number = self._file.fileno()
            while not self._is_stopped():
                # A signal does not end a read from a pipe to which nothing is written.
                if not select.select([number], [], [], _LOOK_S)[0]:
                    continue
                if not (piece := os.read(number, _PIECE_BYTES)):
                    return
                yield piece
            return
        assert self._store is not None
        assert self.size_bytes is not None
        for start in range(0, self.size_bytes, _PIECE_BYTES):
            if self._is_stopped():
                return
            stop = min(start + _PIECE_BYTES, self.size_bytes)
            piece, _ = self._store.read(self._key, start, stop, self._version)
            yield piece

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._store is not None:
            self._store.close()


def split_url(url: str) -> tuple[str, str]:
    """Return the folder and the name of a file's URL. A query stays with the folder, as stores expect it.

    Raises ConfigError if the URL names no file.
    """
    address, mark, query = url.partition("?") if scheme_of(url) in ("http", "https") else (url, "", "")
    folder, slash, name = address.rpartition("/")
    if not slash or not name or folder.endswith(":/"):
        raise ConfigError(f"{redacted(url)}: expected the URL of a file, such as s3://bucket/requests.jsonl")
    return f"{folder}{mark}{query}", name


__all__ = ["STDIN", "Source", "split_url"]
