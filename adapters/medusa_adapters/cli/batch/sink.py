"""The file of results: one to which lines are appended, or an object that is written when the batch ends."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from medusa_runtime.errors import ConfigError, MissingPackageError, StorageError
from medusa_runtime.storage.base import FSSPEC_EXTRAS, redacted, scheme_of

from .lines import key_of

_PIECE_BYTES = 1 << 20
NoteId = Callable[[str], object]


class Sink(Protocol):
    """Where results go. ``write`` may be called by any thread. Both raise StorageError.

    Nothing is written behind a line that could not be written: it may be there in part.
    """

    def write(self, line: bytes) -> None: ...

    def close(self) -> None: ...


def open_sink(place: str, *, resume: bool, note: NoteId) -> Sink:
    """Open the file of results. With ``resume``, call ``note`` with the key of each in it, and keep its lines.

    Raises ConfigError if there are results already, unless ``resume``; StorageError; and MissingPackageError.
    """
    scheme = scheme_of(place)
    if scheme in ("", "file"):
        return _File(Path(place.removeprefix("file://")).expanduser(), resume, note)
    return _StoredObject(place, resume, note)


class _File:
    """A local file. Each line is one write at its end, so a killed batch leaves at most one line that is not whole."""

    def __init__(self, path: Path, resume: bool, note: NoteId) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._failed: StorageError | None = None
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
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
            raise _there_are_results(str(self._path))
        if size:
            with open(self._path, "rb") as file:
                whole = _note_ids(file, str(self._path), note)
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
        os.close(self._fd)


def _lock_file(fd: int, path: Path) -> None:
    """Keep other batches from writing to a file until this process ends. Raises ConfigError if one does."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # of another kind: a file system without locks
        if error.errno == errno.EWOULDBLOCK:
            raise ConfigError(f"{path}: another medusa batch writes to it; wait for its end, or stop it") from None


class _StoredObject:
    """An object in a store, through fsspec. Stores cannot append, so it is there when it is closed, or as it was.

    It is begun with the first result: a batch that is stopped before leaves none.
    """

    def __init__(self, url: str, resume: bool, note: NoteId) -> None:
        self._url = url
        self._lock = threading.Lock()
        try:
            import fsspec

            self._system, self._path = fsspec.core.url_to_fs(url)
        except ImportError as error:
            extra = FSSPEC_EXTRAS.get(scheme_of(url))
            wanted = f'pip install "medusa-runtime[{extra}]"' if extra else f"pip install fsspec s3fs ({error})"
            raise MissingPackageError(f"results at {scheme_of(url)}:// need an optional package: {wanted}") from None
        except ValueError as error:
            raise ConfigError(f"{redacted(url)} cannot be written: {error}") from None
        try:
            self._replaces = bool(self._system.exists(self._path))
            self._whole_bytes = 0
            self._file: Any = None
            self._failed: StorageError | None = None
            if self._replaces and resume:
                with self._system.open(self._path, "rb") as file:
                    self._whole_bytes = _note_ids(file, redacted(url), note)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 each file system has errors of its own
            raise self._failure(error) from None
        if self._replaces and not resume:
            raise _there_are_results(redacted(url))

    def _begin(self) -> Any:
        """Open the object, and write the earlier results to it."""
        file = self._system.open(self._path + _NEW if self._replaces else self._path, "wb")
        for piece in self._earlier():
            file.write(piece)
        return file

    def _earlier(self) -> Iterator[bytes]:
        if not self._whole_bytes:
            return
        whole = self._whole_bytes
        with self._system.open(self._path, "rb") as file:
            while whole and (piece := file.read(min(_PIECE_BYTES, whole))):
                whole -= len(piece)
                yield piece

    def write(self, line: bytes) -> None:
        with self._lock:
            if self._failed is not None:
                raise self._failed
            try:
                self._file = self._file or self._begin()
                self._file.write(line)
            except Exception as error:  # noqa: BLE001
                self._failed = self._failure(error)
                raise self._failed from None

    def close(self) -> None:
        """Put the object into the store."""
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.close()
                if self._replaces:
                    self._system.mv(self._path + _NEW, self._path)
            except Exception as error:  # noqa: BLE001
                raise self._failure(error) from None

    def _failure(self, error: Exception) -> StorageError:
        return StorageError(f"{redacted(self._url)} cannot be written ({type(error).__name__}: {error})")


_NEW = ".new"


def _note_ids(file: Any, name: str, note: NoteId) -> int:
    """Call ``note`` with the keys of a file's results, and return the size of its whole lines. Raises ConfigError."""
    whole = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            break
        try:
            if line.strip():
                note(key_of(line))
        except (ValueError, RecursionError):
            raise ConfigError(
                f"{name}: expected results of a batch, found something else in line {number}; choose another file"
            ) from None
        whole += len(line)
    return whole


def _there_are_results(name: str) -> ConfigError:
    return ConfigError(f"{name}: there are results already; --resume goes on behind them, or choose another file")
