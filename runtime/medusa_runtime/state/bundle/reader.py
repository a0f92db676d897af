"""Read a state bundle from any store. The manifest and the blobs are each read as a whole and verified.

Everything that is wrong with a bundle raises StateError. The caller decides whether a start goes on without it.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ...container_limits import memory_available_bytes
from ...errors import StateError, StorageError
from ...storage.base import Store
from .held_folder import HeldFolder
from .locate import BLOBS, hold, read_manifest
from .manifest import Artifact, Manifest

if TYPE_CHECKING:
    from ..trust import Trust

_PIECE_BYTES = 8 << 20
_THREADS = 4
_MEMORY_SHARE = 0.25


class Bundle:
    """A bundle in a store, below ``prefix``, which is empty or ends in a slash. Thread-safe.

    A folder on this machine is held open until ``close``. The store is its owner's to close.
    """

    def __init__(self, store: Store, prefix: str = "") -> None:
        self._url, self._given = store.url, store
        self._store, self._prefix = hold(store, prefix)

    def manifest_text(self) -> bytes | None:
        """Read the manifest's text; None if there is no bundle. Raises StateError or StorageError."""
        return read_manifest(self._store, self._prefix)

    def manifest(self) -> Manifest | None:
        """Read the manifest; None if there is no bundle. Raises StateError or StorageError."""
        text = self.manifest_text()
        return None if text is None else Manifest.parse(text)

    def objection(self, trust: Trust, manifest: Manifest) -> str | None:
        """Return why code from this bundle may not be run; None if it may."""
        held = self._store.place if isinstance(self._store, HeldFolder) else None
        return trust.objection(self._url, self._prefix, manifest, held=held)

    def close(self) -> None:
        """Close what this object has opened. May be called twice."""
        if self._store is not self._given:
            self._store.close()

    def check_trusted(self, trust: Trust, manifest: Manifest) -> None:
        """Raise StateError if code from this bundle may not be run."""
        if (objection := self.objection(trust, manifest)) is not None:
            raise StateError(objection)

    def read(self, artifact: Artifact) -> bytes:
        """Read a blob from the manifest or the store.

        Raises StateError if it is missing, damaged, or larger than a quarter of the free memory.
        """
        if artifact.inline is not None:
            return bytes(check_blob(artifact, artifact.inline))
        buffer = bytearray(check_size(artifact))
        self.read_into(artifact, memoryview(buffer))
        return bytes(buffer)

    def read_start(self, artifact: Artifact, size_bytes: int) -> bytes:
        """Read a blob's first bytes, which are not verified. Raises StateError or StorageError."""
        if artifact.inline is not None:
            return artifact.inline[:size_bytes]
        return self._store.read(f"{self._prefix}{BLOBS}/{artifact.sha256}", 0, min(size_bytes, artifact.size))[0]

    def read_into(self, artifact: Artifact, buffer: memoryview) -> None:
        """Read a blob into a buffer of its size, several pieces at a time. After an error, the content is undefined."""
        name = f"{self._prefix}{BLOBS}/{artifact.sha256}"
        try:
            info = self._store.stat(name)
            if info.size != artifact.size:
                raise StateError(
                    f"its blob has {info.size:,} bytes, expected {artifact.size:,}; upload the bundle again"
                )

            def piece(start: int) -> None:
                self._store.read_into(name, start, buffer[start : start + _PIECE_BYTES], info.version)

            starts = range(0, artifact.size, _PIECE_BYTES)
            if len(starts) == 1:
                piece(0)
            elif starts:
                with ThreadPoolExecutor(_THREADS, "state") as pool:
                    list(pool.map(piece, starts))
        except StorageError as error:
            raise StateError(f"its blob cannot be read: {error}") from None
        check_blob(artifact, buffer)


def check_size(artifact: Artifact) -> int:
    """Return the blob's size. Raises StateError if it would take too much of the free memory."""
    if artifact.size > (room := int(memory_available_bytes() * _MEMORY_SHARE)):
        raise StateError(f"its blob is said to have {artifact.size:,} bytes, expected at most {room:,}")
    return artifact.size


def check_blob(artifact: Artifact, data: bytes | memoryview) -> bytes | memoryview:
    """Return the data unchanged if it has the artifact's size and digest. Raises StateError if not."""
    if len(data) != artifact.size:
        raise StateError(f"its blob has {len(data):,} bytes, expected {artifact.size:,}; materialize again")
    if hashlib.sha256(data).hexdigest() != artifact.sha256:
        raise StateError("its blob's sha256 is wrong, so it was damaged or replaced; upload or materialize it again")
    return data


__all__ = ["Bundle", "check_blob", "check_size"]
