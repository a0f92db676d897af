"""The protocol every object store speaks, and the registry that finds one by URL scheme."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol


class ObjectInfo(NamedTuple):
    """Size in bytes, and what identifies this version of the object (an ETag or the like), if the store tells."""

    size: int
    version: str | None


class Store(Protocol):
    """One checkpoint's folder in an object store. Keys are paths relative to it. All calls are thread-safe."""

    url: str

    def stat(self, key: str) -> ObjectInfo:
        """Raises ObjectNotFoundError, ForbiddenError, UnreachableError."""

    def read(self, key: str, start: int, stop: int, version: str | None = None) -> tuple[bytes, ObjectInfo]:
        """At most the bytes [start, stop); fewer only at the object's end. ObjectChangedError if not that version."""

    def read_into(self, key: str, start: int, buffer: memoryview, version: str | None = None) -> None:
        """Fill the whole buffer from ``start``, without intermediate copies; retries and resumes inside."""

    def local_path(self, key: str) -> Path | None:
        """The object as a file on this machine that can be mapped, or None."""

    def close(self) -> None: ...
