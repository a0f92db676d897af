"""A folder in a store that several workers share. Through its objects they reach each other (ParaServe §8.5)."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from medusa_runtime.errors import EngineError, MissingPackageError
from medusa_runtime.process_limits import as_limit_error
from medusa_runtime.storage.base import redacted, scheme_of
from medusa_runtime.storage.retry import CallThreads, NoAnswerError

T = TypeVar("T")

LARGEST_OBJECT_BYTES = 8 << 20
_ANSWER_S = 10.0  # the time limit of one call
_MOST_CALLS = 32  # at the same time; a group's largest listener has half as many


class Mailbox(Protocol):
    """Named objects. Names are paths relative to the folder. All calls are thread-safe and raise EngineError."""

    def put(self, name: str, data: bytes) -> None:
        """Write an object, which must not be empty. Others see it whole or not at all."""

    def get(self, name: str) -> bytes | None:
        """Read an object, or return None if it is not there. It is an error if it is larger than any of ours."""

    def has(self, name: str) -> bool:
        """Return whether an object is there, without reading it."""

    def delete(self, name: str) -> None:
        """Remove an object, if it is there."""

    def clear(self, folder: str) -> None:
        """Remove a folder with all objects below it, if it is there."""

    def names(self, folder: str) -> list[str]:
        """List the objects and folders directly below a folder, by their names in it."""


class BoundedMailbox:
    """A mailbox at a path, or a URL of a store that fsspec can write to.

    Its calls raise EngineError when the store has not answered for ten seconds.
    """

    def __init__(self, url: str) -> None:
        """Open the mailbox. Raises MissingPackageError, which says what to install, and EngineError."""
        self._shown = redacted(url)
        self._threads = CallThreads(_MOST_CALLS)
        self._inner = self._within(lambda: _unbounded(url))

    def put(self, name: str, data: bytes) -> None:
        self._within(lambda: self._inner.put(name, data))

    def get(self, name: str) -> bytes | None:
        return self._within(lambda: self._inner.get(name))

    def has(self, name: str) -> bool:
        return self._within(lambda: self._inner.has(name))

    def delete(self, name: str) -> None:
        self._within(lambda: self._inner.delete(name))

    def clear(self, folder: str) -> None:
        self._within(lambda: self._inner.clear(folder))

    def names(self, folder: str) -> list[str]:
        return self._within(lambda: self._inner.names(folder))

    def _within(self, call: Callable[[], T]) -> T:
        try:
            return self._threads.call_within(_ANSWER_S, call)
        except NoAnswerError:
            raise EngineError(f"{self._shown}: the store has not answered within {_ANSWER_S:g} s") from None
        except RuntimeError as error:  # there is no room for a thread
            raise EngineError(f"{self._shown} cannot be reached: {as_limit_error(error) or error}") from None


def _unbounded(url: str) -> Mailbox:
    scheme = scheme_of(url)
    if scheme in ("", "file"):
        return FolderMailbox(Path(unquote(urlsplit(url).path) if scheme else url))
    return FsspecMailbox(url)


class FolderMailbox:
    """A folder of a file system that the workers share, such as NFS."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: set[Path] = set()

    def put(self, name: str, data: bytes) -> None:
        path = self._folder / name
        beside = path.with_name(f".{secrets.token_hex(8)}")
        try:
            if path.parent not in self._made:
                path.parent.mkdir(0o700, parents=True, exist_ok=True)  # activations are of prompts
                self._made.add(path.parent)
            beside.write_bytes(data)
            beside.rename(path)
        except OSError as error:
            with suppress(OSError):
                beside.unlink()  # half an object, as on a full disk
            raise EngineError(f"{path} could not be written: {error.strerror}") from None

    def get(self, name: str) -> bytes | None:
        path = self._folder / name
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise EngineError(f"{path}: expected a file of another worker, found something else")
                data = file.read(LARGEST_OBJECT_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EngineError(f"{path} could not be read: {error.strerror}") from None
        return _bounded(data, str(path))

    def has(self, name: str) -> bool:
        return os.path.lexists(self._folder / name)

    def delete(self, name: str) -> None:
        with suppress(OSError):
            (self._folder / name).unlink()

    def clear(self, folder: str) -> None:
        shutil.rmtree(self._folder / folder, ignore_errors=True)
        self._made.discard(self._folder / folder)

    def names(self, folder: str) -> list[str]:
        try:
            return [name for name in os.listdir(self._folder / folder) if not name.startswith(".")]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise EngineError(f"{self._folder / folder} could not be listed: {error.strerror}") from None


class FsspecMailbox:
    """A prefix of an object store, through fsspec."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # 30 ms, and only for groups without connections
        except ModuleNotFoundError:
            raise MissingPackageError(
                f"{redacted(url)}: writing to this store needs fsspec: pip install fsspec"
            ) from None
        try:
            store, root = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise MissingPackageError(f"{redacted(url)}: this store cannot be written to: {error}") from None
        self._store: Any = store
        self._root, self._shown = root.rstrip("/"), redacted(url)

    def put(self, name: str, data: bytes) -> None:
        try:
            self._store.pipe_file(f"{self._root}/{name}", data)
        except Exception as error:  # noqa: BLE001  each store has errors of its own
            raise EngineError(f"{self._shown}/{name} could not be written: {error}") from None

    def get(self, name: str) -> bytes | None:
        try:
            data = bytes(self._store.cat_file(f"{self._root}/{name}", start=0, end=LARGEST_OBJECT_BYTES + 1))
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001  each store has errors of its own
            raise EngineError(f"{self._shown}/{name} could not be read: {error}") from None
        return _bounded(data, f"{self._shown}/{name}")

    def has(self, name: str) -> bool:
        try:
            self._store.info(f"{self._root}/{name}")
        except FileNotFoundError:
            return False
        except Exception as error:  # noqa: BLE001  each store has errors of its own
            raise EngineError(f"{self._shown}/{name} could not be looked for: {error}") from None
        return True

    def delete(self, name: str) -> None:
        with suppress(Exception):
            self._store.rm_file(f"{self._root}/{name}")

    def clear(self, folder: str) -> None:
        with suppress(Exception):
            self._store.rm(f"{self._root}/{folder}", recursive=True)

    def names(self, folder: str) -> list[str]:
        try:
            found = self._store.ls(f"{self._root}/{folder}".rstrip("/"), detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:  # noqa: BLE001  each store has errors of its own
            raise EngineError(f"{self._shown}/{folder} could not be listed: {error}") from None
        return [name.rstrip("/").rpartition("/")[2] for name in found]


def _bounded(data: bytes, shown: str) -> bytes:
    if len(data) > LARGEST_OBJECT_BYTES:
        raise EngineError(f"{shown}: expected at most {LARGEST_OBJECT_BYTES} bytes from another worker, found more")
    return data


__all__ = ["LARGEST_OBJECT_BYTES", "BoundedMailbox", "FolderMailbox", "FsspecMailbox", "Mailbox"]
