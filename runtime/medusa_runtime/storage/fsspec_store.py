"""The store for all other URLs that fsspec knows: webhdfs://, sftp://, github://, memory:// and others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import (
    ForbiddenError,
    MedusaError,
    MissingPackageError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
    UnreachableError,
)
from .base import Advance, ObjectInfo, redacted, require_validator, scheme_of, size_as_version
from .retry import NoAnswerError, RetryPolicy, TransientError, call_within, with_retries

T = TypeVar("T")
_PIECE_S = 60.0  # the time limit for a piece of 4 MiB, which then comes at 70 KB/s or more
_VERSION_KEYS = (
    "ETag",
    "etag",
    "md5Hash",
    "generation",
    "version",
    "oid",
    "blob_id",
    "sha",
    "CRC",
    "LastModified",
    "last_modified",
    "mtime",
    "modified",
    "modify",
    "created",
)
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
# Given by name, because each file system has an HTTP client of its own (httpx, requests, aiohttp), which may not be
# installed.
_UNREACHABLE = {"TransportError", "ConnectError", "ClientConnectionError", "ProxyError", "ConnectTimeout", "Timeout"}


class FsspecStore:
    """A folder in one of fsspec's file systems."""

    reuses_buffer = False
    interruptible = False

    def __init__(self, url: str) -> None:
        self.url = url
        self.retries = RetryPolicy()
        try:
            import fsspec

            fsspec.get_filesystem_class(scheme_of(url))  # imports the scheme's own package, in 0.05 to 0.5 s
            self._system, self._root = self._answered(lambda: fsspec.core.url_to_fs(url))
        except ImportError as error:
            raise self._missing(error) from None
        except ValueError as error:
            raise StorageError(f"{redacted(url)} cannot be opened: {error}") from None
        except NoAnswerError as error:  # some file systems connect at once
            raise UnreachableError(f"{redacted(url)}: {error}; {_network_hint()}") from None
        except OSError as error:
            raise UnreachableError(f"{redacted(url)}: cannot be reached: {error.strerror or error}") from None

    def _answered(self, operation: Callable[[], T]) -> T:
        """Return the answer to a short question. Raises NoAnswerError: many file systems have no time limit."""
        return call_within(self.retries.stall_s, operation)

    def _missing(self, error: ImportError) -> MissingPackageError:
        return MissingPackageError(f"{scheme_of(self.url)}:// needs a package that fsspec asks for: {error}")

    def name(self, key: str) -> str:
        return f"{redacted(self.url).rstrip('/')}/{key}"

    def _path(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{key}"

    def _translated(self, key: str, error: Exception) -> MedusaError | TransientError:
        name = self.name(key)
        if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
            return ObjectNotFoundError(f"{name}: no such object; check the address")
        status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, PermissionError) or status in (401, 403):
            return ForbiddenError(
                f"{name}: access denied ({type(error).__name__}); expected credentials that may read it"
            )
        if isinstance(error, NoAnswerError):
            return TransientError(UnreachableError(f"{name}: {error}; {_network_hint()}"))
        if _is_unreachable(error):
            return TransientError(
                UnreachableError(f"{name}: cannot be reached ({type(error).__name__}); {_network_hint()}")
            )
        return TransientError(StorageError(f"{name}: {type(error).__name__} while reading"))

    def stat(self, key: str) -> ObjectInfo:
        return with_retries(self.retries, lambda: self._stat_once(key))

    def _stat_once(self, key: str) -> ObjectInfo:
        try:
            info: dict[str, Any] = self._answered(lambda: self._system.info(self._path(key)))
        except Exception as error:  # noqa: BLE001  each file system has errors of its own
            raise self._translated(key, error) from None
        if info.get("type") == "directory":
            raise ObjectNotFoundError(f"{self.name(key)}: expected an object, found a folder")
        size = info.get("size")
        if not isinstance(size, int) or size < 0:  # None from a server that sends no length
            raise StorageError(f"{self.name(key)}: the store does not say how many bytes it has; expected a size")
        version = next((str(info[name]) for name in _VERSION_KEYS if info.get(name)), None)
        return ObjectInfo(size, version or size_as_version(size))

    def _require_validator(self, key: str, version: str | None) -> None:
        require_validator(self.name(key), version, "an ETag nor a date of change")

    def _compare(self, key: str, version: str | None) -> ObjectInfo:
        """Look an object up anew. Raises ObjectChangedError if it has another version than the given one."""
        self._system.invalidate_cache()
        info = self.stat(key)
        if version is not None and info.version != version:
            raise ObjectChangedError(
                f"{self.name(key)} changed while it was read: expected version {version}, found {info.version}"
            )
        return info

    def read(self, key: str, start: int, stop: int, version: str | None = None) -> tuple[bytes, ObjectInfo]:
        self._require_validator(key, version)
        info = self._compare(key, version)
        stop = min(stop, info.size)
        if start >= stop:
            return b"", info
        data = self._range(key, start, stop)
        self._compare(key, info.version)  # fsspec has no conditional reads, so the bytes may be of a later version
        return data, info

    def _range(self, key: str, start: int, stop: int) -> bytes:
        return with_retries(self.retries, lambda: self._range_once(key, start, stop))

    def _range_once(self, key: str, start: int, stop: int) -> bytes:
        try:
            data: bytes = call_within(_PIECE_S, lambda: self._system.cat_file(self._path(key), start=start, end=stop))
        except Exception as error:  # noqa: BLE001
            raise self._translated(key, error) from None
        if len(data) != stop - start:
            raise TransientError(StorageError(f"{self.name(key)}: expected {stop - start} bytes, found {len(data)}"))
        return data

    def read_into(
        self,
        key: str,
        start: int,
        buffer: memoryview,
        version: str | None = None,
        advance: Advance | None = None,
        length: int | None = None,
    ) -> None:
        """Fill the buffer in pieces of 4 MiB, since fsspec returns the bytes in memory of its own."""
        self._require_validator(key, version)
        piece = 4 << 20
        for at in range(0, len(buffer), piece):
            end = min(at + piece, len(buffer))
            buffer[at:end] = self._range(key, start + at, start + end)
        self._compare(key, version)
        if advance:
            advance(len(buffer))

    def interrupt(self, thread: int) -> None: ...

    def local_path(self, key: str) -> Path | None:
        return None

    def close(self) -> None: ...


def _network_hint() -> str:
    proxy = next((name for name in _PROXIES if os.environ.get(name)), None)
    through = f"through the proxy in {proxy}" if proxy else "HTTPS_PROXY is not set"
    return f"expected a network that reaches it ({through})"


def _is_unreachable(error: Exception) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, (ConnectionError, TimeoutError)) or bool(names & _UNREACHABLE)
