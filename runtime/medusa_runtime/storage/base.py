"""The protocol that every object store implements, and the table that finds a store by its URL's scheme."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from ..errors import ConfigError, ObjectNotFoundError, StorageError


class BucketNotFoundError(ObjectNotFoundError):
    """There is not even the bucket, so looking for other objects in it is of no use."""


class ObjectInfo(NamedTuple):
    """An object's size in bytes, and a text that identifies its version (such as an ETag) if the store reports one."""

    size: int
    version: str | None


_SIZE = "size="


def size_as_version(size: int) -> str:
    """Return the version to use for an object when the store reports only its size."""
    return f"{_SIZE}{size}"


def require_validator(name: str, version: str | None, missing: str) -> None:
    """Raise StorageError if ``version`` is only a size, which would not reveal a replacement of the same size.

    Call it before a second range of an object is read. ``missing`` names, for the message, what the store would have
    to send.
    """
    if version is not None and version.startswith(_SIZE):
        raise StorageError(
            f"{name}: the store sends neither {missing}, so nothing shows whether two ranges are of the same version; "
            "serve the checkpoint from a store that sends one of them (nginx, an object store), or copy it to a folder "
            "first"
        )


# Called while a range arrives, with the number of bytes that have arrived, counted from the range's start.
Advance = Callable[[int], None]


class Store(Protocol):
    """The folder of a checkpoint in an object store. Keys are paths relative to it. All calls are thread-safe."""

    url: str
    reuses_buffer: bool  # whether ``read_into`` can fill a buffer again and again, see there
    interruptible: bool  # whether a ``read_into`` ends soon after ``interrupt``, or soon anyway

    def stat(self, key: str) -> ObjectInfo:
        """Look an object up. Raises ObjectNotFoundError, ForbiddenError, UnreachableError."""

    def read(self, key: str, start: int, stop: int, version: str | None = None) -> tuple[bytes, ObjectInfo]:
        """Read the bytes [start, stop), fewer only at the object's end.

        Raises ObjectChangedError if the object has another version than the given one.
        """

    def read_into(
        self,
        key: str,
        start: int,
        buffer: memoryview,
        version: str | None = None,
        advance: Advance | None = None,
        length: int | None = None,
    ) -> None:
        """Fill the whole buffer with the object's bytes from ``start`` on, without intermediate copies.

        A transfer that breaks off is retried and resumed inside.

        A store that ``reuses_buffer`` takes a ``length`` that is larger than the buffer: whenever the buffer is full,
        it is filled from its start again. ``advance`` is called first, and must be done with the bytes when it returns.
        """

    def interrupt(self, thread: int) -> None:
        """End the ``read_into`` of another thread, given by its ``get_ident``. It then raises StorageError.

        This is for a range that another request has brought meanwhile. Stores that cannot do it do nothing.
        """

    def local_path(self, key: str) -> Path | None:
        """Return the object's path if it is a file on this machine that can be mapped, or else None."""

    def close(self) -> None: ...


# Schemes that have a store of our own; each is imported only when a URL asks for it.
STORES = {
    "": "local:LocalStore",
    "file": "local:LocalStore",
    "http": "http.store:HttpStore",
    "https": "http.store:HttpStore",
    "s3": "s3:S3Store",
    "hf": "hub:HubStore",
    "gs": "google_cloud:GoogleCloudStore",
    "gcs": "google_cloud:GoogleCloudStore",
    "az": "azure:AzureStore",
    "abfs": "azure:AzureStore",
    "abfss": "azure:AzureStore",
}
# On the Hub, whose files have addresses with /resolve/.
_MODEL_PAGE = r"https://(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)/?(?:$|[?#]|tree/|blob/)"
_BY_FSSPEC = "fsspec+"  # before a scheme that fsspec is to read, although there is a store of our own


def open_store(url: str) -> Store:
    """Open the store of a checkpoint's folder.

    Raises ConfigError, which lists the known schemes, or MissingPackageError, which says what to install.
    """
    module, _, name = find_store(url).partition(":")
    url = url[len(_BY_FSSPEC) :] if scheme_of(url).startswith(_BY_FSSPEC) else url
    opened: Store = getattr(importlib.import_module(f"{__package__}.{module}"), name)(url)
    return opened


def find_store(url: str) -> str:
    """Return the module and class of the store that reads a URL. Raises ConfigError if none on this machine does."""
    if not url:
        raise ConfigError("expected a checkpoint's folder or URL, found an empty text")
    scheme = scheme_of(url)
    if scheme == "https" and (page := re.match(_MODEL_PAGE, url)):
        raise ConfigError(f"{redacted(url)} is the page of a model, not of its files: expected hf://{page[1]}")
    if scheme in STORES:
        return STORES[scheme]
    if _known_to_fsspec(scheme.removeprefix(_BY_FSSPEC)):
        return "fsspec_store:FsspecStore"
    known = ", ".join(["a path", *(f"{name}://" for name in STORES if name)])
    raise ConfigError(
        f"{redacted(url)}: unknown scheme {scheme}://; expected one of {known}, or another one that fsspec knows "
        '(pip install "medusa-runtime[fsspec]")'
    )


def scheme_of(url: str) -> str:
    """Return the URL's scheme in lower case; empty for a path, which may contain ``://`` behind a slash."""
    scheme, separator, _ = url.partition("://")
    return scheme.lower() if separator and "/" not in scheme else ""


def _known_to_fsspec(scheme: str) -> bool:
    try:
        from fsspec.registry import known_implementations, registry  # 30 ms, and only for a scheme that is not ours
    except ImportError:
        return False
    return scheme in known_implementations or scheme in registry


def redacted(url: str) -> str:
    """Return the URL for messages: without user, password and query, which may be credentials."""
    if not scheme_of(url):
        return url
    scheme, _, rest = url.partition("://")  # not by urlsplit, which finds no scheme if it has a bad character
    authority, _, path = rest.partition("/")
    if "@" not in authority and "@" in path and not authority.rpartition(":")[2].isdecimal() and ":" in authority:
        rest = rest.rpartition("@")[2]  # what looks like a port is the beginning of a password with a slash
    try:
        parts = urlsplit("//" + rest)
    except ValueError:  # a bracket that does not begin an address
        return f"{scheme.lower()}://…"
    return f"{scheme.lower()}://{parts.netloc.rpartition('@')[2]}{parts.path}"
