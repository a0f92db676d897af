"""The protocol that every object store implements, and the registry that finds one by its URL's scheme."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from ..errors import ConfigError, StorageError


class ObjectInfo(NamedTuple):
    """An object's size in bytes, and what identifies this version of it (an ETag or the like), if the store says."""

    size: int
    version: str | None


_SIZE = "size="


def size_as_version(size: int) -> str:
    """Return the version of an object of which the store reports nothing but the size."""
    return f"{_SIZE}{size}"


def check_versioned(name: str, version: str | None, missing: str) -> None:
    """Refuse to read a second range of an object when a replacement of the same size could not be seen.

    ``missing``: what the store would have to send. Raises StorageError.
    """
    if version is not None and version.startswith(_SIZE):
        raise StorageError(
            f"{name}: the store sends neither {missing}, so nothing shows whether two ranges are of the same version; "
            "serve the checkpoint from a store that sends one of them (nginx, an object store), or copy it to a folder "
            "first"
        )


# Called while a range arrives, with the bytes of the buffer that are there, counted from its start.
Advance = Callable[[int], None]


class Store(Protocol):
    """The folder of a checkpoint in an object store. Keys are paths relative to it. All calls are thread-safe."""

    url: str
    refills: bool  # whether read_into can fill a buffer again and again
    interrupts: bool  # whether ``interrupt`` ends a read_into soon, or it ends soon by itself

    def stat(self, key: str) -> ObjectInfo:
        """Look an object up. Raises ObjectNotFoundError, ForbiddenError, UnreachableError."""

    def read(self, key: str, start: int, stop: int, version: str | None = None) -> tuple[bytes, ObjectInfo]:
        """Read the bytes [start, stop), fewer only at the object's end. ObjectChangedError if not of that version."""

    def read_into(
        self,
        key: str,
        start: int,
        buffer: memoryview,
        version: str | None = None,
        advance: Advance | None = None,
        length: int | None = None,
    ) -> None:
        """Fill the whole buffer from ``start``, without intermediate copies; retries and resumes inside.

        With a ``length`` above the buffer's, where the store ``refills``, the buffer is filled from its start again
        each time it is full. ``advance`` is called before that, and must not need the bytes when it returns.
        """

    def interrupt(self, thread: int) -> None:
        """End the ``read_into`` of another thread (its ``get_ident``), which then raises StorageError.

        Used when another request has brought the range meanwhile. A store that cannot do it does nothing.
        """

    def local_path(self, key: str) -> Path | None:
        """Return the object's path where it is a file on this machine that can be mapped, or None."""

    def close(self) -> None: ...


# Schemes that have a store of our own; each is imported only when a URL asks for it.
STORES = {
    "": "local:LocalStore",
    "file": "local:LocalStore",
    "http": "http.store:HttpStore",
    "https": "http.store:HttpStore",
    "s3": "s3:S3Store",
}
# Schemes that go through fsspec, with the extra that installs what they need.
FSSPEC_EXTRAS = {
    "memory": "fsspec", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure", "hf": "hf",
}  # fmt: skip


def open_store(url: str) -> Store:
    """Open the store of a checkpoint's folder.

    ConfigError lists the known schemes; the message of MissingPackageError says how to install one.
    """
    if not url:
        raise ConfigError("expected a checkpoint's folder or URL, found an empty text")
    scheme = scheme_of(url)
    target = STORES.get(scheme) or ("fsspec_store:FsspecStore" if _known_to_fsspec(scheme) else None)
    if target is None:
        known = ", ".join(["a path", *(f"{name}://" for name in (*STORES, *FSSPEC_EXTRAS) if name)])
        raise ConfigError(
            f"{redacted(url)}: unknown scheme {scheme}://; expected one of {known}, or another one that fsspec knows"
        )
    module, _, name = target.partition(":")
    opened: Store = getattr(importlib.import_module(f"{__package__}.{module}"), name)(url)
    return opened


def scheme_of(url: str) -> str:
    """Return the URL's scheme in lower case; empty for a path, which may hold ``://`` behind a slash."""
    scheme, separator, _ = url.partition("://")
    return scheme.lower() if separator and "/" not in scheme else ""


def _known_to_fsspec(scheme: str) -> bool:
    if scheme in FSSPEC_EXTRAS:
        return True
    try:
        from fsspec.registry import known_implementations, registry  # 30 ms, and only for a scheme that is not ours
    except ImportError:
        return False
    return scheme in known_implementations or scheme in registry


def redacted(url: str) -> str:
    """Return the URL for messages: without user, password and query, which may be credentials."""
    if not scheme_of(url):
        return url
    scheme, _, rest = url.partition("://")  # urlsplit would find none in a scheme with a bad character
    authority, _, path = rest.partition("/")
    if "@" not in authority and "@" in path and not authority.rpartition(":")[2].isdecimal() and ":" in authority:
        rest = rest.rpartition("@")[2]  # no port but the beginning of a password that has a slash
    try:
        parts = urlsplit("//" + rest)
    except ValueError:  # a bracket that opens no address
        return f"{scheme.lower()}://…"
    return f"{scheme.lower()}://{parts.netloc.rpartition('@')[2]}{parts.path}"
