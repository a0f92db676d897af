"""The file of results: one to which lines are appended, or an object written when the batch ends (stored_object.py)."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from medusa_runtime.errors import ConfigError, StorageError
from medusa_runtime.storage.base import scheme_of

from .lines import NoteId, note_ids, there_are_results


class Sink(Protocol):
    """Where results go. ``write`` may be called by any thread. Both raise StorageError.

    Nothing is written behind a line that could not be written: it may be there in part.
    """

    def write(self, line: bytes) -> None: ...

    def close(self) -> None: ...


def open_sink(place: str, *, resume: bool, note: NoteId) -> Sink:
    """Open the file of results. With ``resume``, call ``note`` with the key of each in it, and keep its lines.

    Of an object in a store, so are those that killed batches have left beside it.

    Raises ConfigError if there are results already, unless ``resume``; StorageError; and MissingPackageError.
    """
    if place == "-":
        raise ConfigError("-: expected a path or a URL for results; standard output is /dev/stdout")
    scheme = scheme_of(place)
    if scheme in ("", "file"):
        return _File(Path(place.removeprefix("file://")).expanduser(), resume, note)
    from .stored_object import StoredObject

    return StoredObject(place, resume, note)


class _File:
    """A local file. Each line is one write at its end, so a killed batch leaves at most one line that is not whole.

    A batch that ends without a result leaves no file behind, unless there was one before.
    """

    def __init__(self, path: Path, resume: bool, note: NoteId) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._failed: StorageError | None = None
        self._is_new = not os.path.lexists(path)
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                self._take_up(resume, note)
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as error:
            raise ConfigError(f"{path}: expected a file that can be written: {error.strerror}") from None

    def _take_up(self, resume: bool, note: NoteId) -> None:
        _lock_file(self._fd, self._path)
        size = os.fstat(self._fd).st_size
        if size and not resume:
            raise there_are_results(str(self._path))
        if size:
            with open(self._path, "rb") as file:
                whole = note_ids(file, str(self._path), note)
            os.truncate(self._fd, whole)  # a line that was cut off

    def write(self, line: bytes) -> None:
        with self._lock:
            if self._failed is not None:
                raise self._failed
            left = memoryview(line)
            try:
                while left:
                    left = left[os.write(self._fd, left) :]
            except OSError as error:
                self._failed = StorageError(f"{self._path} cannot be written: {error.strerror}")
                raise self._failed from None

    def close(self) -> None:
        with self._lock, suppress(OSError):  # pipes and some file systems have no fsync
            os.fsync(self._fd)
        with suppress(OSError):
            if self._is_new and not os.fstat(self._fd).st_size:
                self._path.unlink()  # while no other batch can have the lock
        os.close(self._fd)


def _lock_file(fd: int, path: Path) -> None:
    """Keep other batches from writing to a file until this process ends. Raises ConfigError if one does."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return
    taken = ConfigError(f"{path}: another medusa batch writes to it; wait for its end, or stop it")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # of another kind: a file system without locks
        if error.errno == errno.EWOULDBLOCK:
            raise taken from None
    if not os.fstat(fd).st_nlink:  # it has just been removed
        raise taken
