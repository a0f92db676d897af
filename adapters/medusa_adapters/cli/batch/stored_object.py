"""Results as an object in a store, through fsspec. Two batches with one object never replace each other's results.

Stores cannot append, so the results go to an object of their own first. It takes the place of the output when the batch
ends, if the output is still as the batch found it. One batch at a time may do that: it makes an object beside the
output that only one can make (If-None-Match on S3, a generation of 0 on Google Cloud Storage, no overwriting on Azure).
Where a store takes no conditions, or lets nobody delete, the batch that wrote this object last may do it.

Many stores show an object only once it is complete. So a long batch writes several, of some minutes each, and joins
them at its end: if it is killed, they are what it leaves.
"""

from __future__ import annotations

import glob
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from medusa_runtime.errors import ConfigError, MedusaError, MissingPackageError, StorageError
from medusa_runtime.storage.base import redacted, scheme_of

from .leftovers import Leftovers, Range, new_suffix, pieces
from .lines import NoteId, note_ids, there_are_results

logger = logging.getLogger(__name__)

# What writes to these schemes, by the extra of this package that installs it.
_EXTRAS = {"memory": "fsspec", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_PART_S = 300.0  # after which an object of results is completed, and another one begun
# By these an object differs from one that replaces it. Each file system has some of them.
_VERSION = ("ETag", "etag", "generation", "mtime", "LastModified", "last_modified", "created", "ino", "size")


class StoredObject:
    """An object that is there when it is closed, or as it was.

    It is begun with the first result: a batch that is stopped before leaves none, unless killed ones have left some.
    """

    def __init__(self, url: str, resume: bool, note: NoteId) -> None:
        self._name = redacted(url)
        self._lock = threading.Lock()
        try:
            import fsspec

            self._system, self._path = fsspec.core.url_to_fs(url)
        except ImportError as error:
            extra = _EXTRAS.get(scheme_of(url))
            wanted = f'pip install "medusa-runtime[{extra}]"' if extra else f"pip install fsspec s3fs ({error})"
            raise MissingPackageError(f"results at {scheme_of(url)}:// need an optional package: {wanted}") from None
        except ValueError as error:
            raise ConfigError(f"{self._name} cannot be written: {error}") from None
        self._suffix = new_suffix()  # of the object that is being written
        self._parts: dict[str, int] = {}  # the suffixes of those that are complete, and their sizes
        self._part_ends_at = 0.0  # by the monotonic clock
        self._leftovers = Leftovers(self._system, self._path, url)
        self._earlier: list[Range] = []  # results of the output
        self._file: Any = None
        self._closed = False
        self._failed: StorageError | None = None
        try:
            self._publication = _Publication(self._system, self._path + _LOCK)
            self._refuse_if_published()
            self._version = self._find_version()
            if self._version is not None and resume:
                with self._system.open(self._path, "rb") as file:
                    self._earlier = [Range(self._path, 0, note_ids(file, self._name, note))]
            if resume:
                self._leftovers.take_up(note)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 each file system has errors of its own
            raise self._failure(error) from None
        if self._version is not None and not resume:
            raise there_are_results(self._name)
        if not resume:
            self._leftovers.require_none()

    def _refuse_if_published(self) -> None:
        if self._publication.holder() is not None:
            text = "another medusa batch writes its results there now, or was killed while it did"
            kept = "what one that was killed has left in an object ….new beside it, --resume takes up"
            todo = f"wait for its end, or remove {self._name}{_LOCK} if none runs; {kept}"
            raise ConfigError(f"{self._name}: {text}; {todo}")

    def _find_version(self) -> tuple[str, ...] | None:
        """Return what tells the object from one that replaces it, or None if there is none."""
        self._system.invalidate_cache()
        try:
            found = self._system.info(self._path)
        except FileNotFoundError:
            return None
        return tuple(str(found.get(name)) for name in _VERSION)

    def write(self, line: bytes) -> None:
        with self._lock:
            if self._failed is not None:
                raise self._failed
            try:
                if self._file is not None and time.monotonic() >= self._part_ends_at:
                    self._end_part()
                self._file = self._file or self._begin()
                self._file.write(line)
                self._file.flush()  # stores that take whole blocks wait for one
            except _TakenError as error:
                text = "nothing of this one is kept; choose another file, or go on behind its results with --resume"
                self._failed = StorageError(f"{self._name} {error}; {text}")
                raise self._failed from None
            except Exception as error:  # noqa: BLE001
                self._failed = self._failure(error)
                raise self._failed from None

    def _begin(self) -> Any:
        """Open an object for the results, and write the earlier ones to the first. Raises _TakenError."""
        file = self._system.open(self._path + self._suffix, "wb")
        self._part_ends_at = time.monotonic() + _PART_S
        if self._parts:
            return file
        try:
            try:
                for piece in pieces(self._system, [*self._earlier, *self._leftovers.ranges]):
                    file.write(piece)
                file.flush()
            finally:  # a shorter output was written, too
                self._require_unchanged("was written by another batch since this one began")
        except BaseException:
            self._discard(file)
            raise
        return file

    def _end_part(self) -> None:
        """Complete the object that is being written."""
        file, self._file = self._file, None
        size_bytes = file.tell()
        file.close()
        self._parts[self._suffix] = size_bytes
        self._suffix = new_suffix()

    def _join(self) -> None:
        """Make one object of all that are complete, and remove them."""
        if len(self._parts) == 1:
            return
        parts = [Range(self._path + suffix, 0, size_bytes) for suffix, size_bytes in self._parts.items()]
        joined = self._system.open(self._path + self._suffix, "wb")
        try:
            for piece in pieces(self._system, parts):
                joined.write(piece)
        except BaseException:
            self._discard(joined)
            raise
        self._file = joined
        self._end_part()
        self._parts = dict([self._parts.popitem()])
        try:
            for part in parts:
                _remove(self._system, part.path)
        except Exception as error:  # noqa: BLE001
            logger.warning("%s: copies of its results, ….new beside it, could not be removed (%s)", self._name, error)

    def _kept(self) -> str:
        """Return where the results are while they are not in the output, as a part of an error."""
        names = ", ".join(self._name + suffix for suffix in self._parts)
        return f"; the results of this batch are in {names}" if names else ""

    def _require_unchanged(self, message: str) -> None:
        """Raise _TakenError if the output is not as it was when the batch began."""
        if self._find_version() != self._version:
            raise _TakenError(message)

    def _discard(self, file: Any) -> None:
        """Drop an object that has begun. Not every file system can do that before the object is complete."""
        with suppress(Exception):
            file.discard()
        with suppress(Exception):
            file.close()
        with suppress(Exception):
            _remove(self._system, self._path + self._suffix)

    def close(self) -> None:
        """Put the object into the store. Raises StorageError; the results are then in an object of another name."""
        with self._lock:
            is_begun = self._file is not None or self._parts
            if self._closed or (not is_begun and (self._failed is not None or not self._leftovers.ranges)):
                return
            self._closed = True
            try:
                if not is_begun:
                    self._file = self._begin()
                if self._file is not None:
                    self._end_part()
                self._join()
                with self._publication.alone():
                    self._require_unchanged("was written by another batch meanwhile, and stays as that one left it")
                    self._move(*self._parts)
            except _TakenError as error:
                raise StorageError(f"{self._name} {error}{self._kept()}") from None
            except MedusaError:
                raise
            except Exception as error:  # noqa: BLE001
                raise StorageError(f"{self._failure(error)}{self._kept()}") from None

    def _move(self, suffix: str) -> None:
        """Let the results take the place of the output. They may stay in the other object as well."""
        new, system = self._path + suffix, self._system
        try:
            if glob.has_magic(new):  # mv would take it for a pattern
                system.cp_file(new, self._path)
                system.rm_file(new)
            else:
                system.mv(new, self._path)
        except Exception as error:
            if not self._is_copied(new):
                raise
            text = "%s has the results, but %s%s beside it, a copy of them, could not be removed (%s)"
            logger.warning(text, self._name, self._name, suffix, error)

    def _is_copied(self, new: str) -> bool:
        """Return whether the output is the results now. Stores copy an object as a whole or not at all."""
        with suppress(Exception):
            is_new = self._find_version() not in (None, self._version)
            output, results = (self._system.info(path)["size"] for path in (self._path, new))
            return is_new and bool(output == results)
        return False

    def _failure(self, error: Exception) -> StorageError:
        return StorageError(f"{self._name} cannot be written ({type(error).__name__}: {error})")


def _remove(system: Any, path: str) -> None:
    """Remove an object. ``rm`` takes some names for patterns, but not every file system has ``rm_file``."""
    if glob.has_magic(path):
        system.rm_file(path)
    else:
        system.rm(path)


_LOCK = ".lock"


class _TakenError(Exception):
    """Another batch has written the output, or is about to."""


class _Publication:
    """The right to replace the output: an object that one batch at a time can make."""

    def __init__(self, system: Any, path: str) -> None:
        self._system = system
        self._path = path
        self._own = os.urandom(16).hex().encode()

    def holder(self) -> bytes | None:
        """Return the content of the object, or None if there is none, or an empty one, which could not be removed."""
        self._system.invalidate_cache()
        try:
            return bytes(self._system.cat_file(self._path)) or None
        except FileNotFoundError:
            return None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have the right for as long as the block runs. Raises _TakenError if another batch has it."""
        self._require(None)
        try:
            self._make()
            # Without conditions one may have replaced another's: the last one to make it has the right. And a store may
            # have made it, and have refused the same request when it was sent again.
            self._require(self._own)
            yield
        except BaseException:
            self._free_own()
            raise
        try:
            self._free()
        except Exception as error:  # noqa: BLE001
            text = f"the results are written, but the {_LOCK} beside them keeps other batches out; remove it"
            raise StorageError(f"{text} ({type(error).__name__}: {error})") from None

    def _require(self, holder: bytes | None) -> None:
        if self.holder() != holder:
            text = "is being written by another batch, or one was killed while it did"
            raise _TakenError(f"{text}: then remove the {_LOCK} beside it")

    def _make(self) -> None:
        try:
            self._system.pipe_file(self._path, self._own, mode="create")
        except Exception:  # noqa: BLE001 another has made it, or the store takes no conditions
            if self.holder() is None:
                self._system.pipe_file(self._path, self._own)

    def _free_own(self) -> None:
        """Free the right if this batch has it."""
        with suppress(Exception):
            if self.holder() == self._own:
                self._free()

    def _free(self) -> None:
        try:
            _remove(self._system, self._path)
        except Exception:  # noqa: BLE001 not everybody who may write may delete
            self._system.pipe_file(self._path, b"")


__all__ = ["StoredObject"]
