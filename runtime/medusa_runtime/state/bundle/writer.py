"""Write a state bundle into a folder: the blobs first, the manifest last, so that readers never see half a bundle."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ...errors import ConfigError, StateError, StorageError
from ...storage.local import LocalStore
from .locate import BLOBS, MANIFEST, read_manifest
from .manifest import Artifact, Manifest

if TYPE_CHECKING:
    from .signing import Signer

# Inline blobs stay small, so that all together take a store less time to send than a round trip.
_MOST_INLINE_BYTES = 96 << 10
_PART = ".part"


class BundleWriter:
    """The only writer of a bundle, as long as the context lasts.

    If it is killed at any point, the bundle is as before, with some files at most that the next commit removes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = -1
        self._made_folder = False

    def __enter__(self) -> Self:
        """Lock the folder. Raises ConfigError if it cannot be written to, and StateError while another process does."""
        self._made_folder = not self._folder.exists()
        try:
            (self._folder / BLOBS).mkdir(parents=True, exist_ok=True)
            probe = self._folder / BLOBS / f"probe{_PART}"
            probe.write_bytes(b"")
            probe.unlink()
            if (self._folder / MANIFEST).is_dir():  # anything else is replaced
                raise IsADirectoryError(errno.EISDIR, f"{MANIFEST} is a folder")
            self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"{self._folder}: the bundle cannot be written there ({error.strerror}); expected a writable folder, "
                "choose another with --out"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise StateError(f"{self._folder}: another medusa materialize is writing there; wait for it") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
        os.close(self._lock)  # this releases the lock

    def discard(self) -> None:
        """Remove all files that the committed manifest does not name, and the folder if this writer made it."""
        self._keep_only(self.existing())
        (self._folder / f"{MANIFEST}{_PART}").unlink(missing_ok=True)
        if self._made_folder:
            with suppress(OSError):  # it is not empty
                (self._folder / BLOBS).rmdir()
                self._folder.rmdir()

    def existing(self) -> Manifest:
        """Read the present manifest. If there is none, or it cannot be read, return an empty one."""
        try:
            text = read_manifest(LocalStore(str(self._folder)), "")
            return Manifest(()) if text is None else Manifest.parse(text)
        except (StorageError, StateError):
            return Manifest(())

    def add(self, kind: str, key: dict[str, str], data: bytes | Path) -> Artifact:
        """Write a blob. It belongs to the bundle once a committed manifest names it."""
        part = self._folder / BLOBS / f"{os.getpid()}{_PART}"
        digest = hashlib.sha256()
        size = 0
        with open(part, "wb") as target:
            for piece in _pieces(data):
                digest.update(piece)
                target.write(piece)
                size += len(piece)
            target.flush()
            os.fsync(target.fileno())
        inline = part.read_bytes() if size <= _MOST_INLINE_BYTES else None
        part.replace(self._folder / BLOBS / digest.hexdigest())
        return Artifact(kind, key, digest.hexdigest(), size, inline)

    def commit(self, manifest: Manifest, signer: Signer | None = None) -> None:
        """Make this the bundle's content, in one step. Files that it no longer names are removed afterwards."""
        _sync(self._folder / BLOBS)
        part = self._folder / f"{MANIFEST}{_PART}"
        with open(part, "wb") as target:
            target.write(manifest.to_json(signer))
            target.flush()
            # A start runs code only from a manifest that no other user can write, so ignore the umask.
            os.fchmod(target.fileno(), os.fstat(target.fileno()).st_mode & ~0o022)
            os.fsync(target.fileno())
        part.replace(self._folder / MANIFEST)
        _sync(self._folder)
        self._keep_only(manifest)

    def _keep_only(self, manifest: Manifest) -> None:
        named = {artifact.sha256 for artifact in manifest.artifacts}
        for blob in (self._folder / BLOBS).iterdir():
            if blob.name not in named:
                with suppress(OSError):
                    shutil.rmtree(blob) if blob.is_dir() else blob.unlink()


def _pieces(data: bytes | Path) -> Iterable[bytes]:
    if isinstance(data, bytes):
        yield data
        return
    with open(data, "rb") as source:
        while piece := source.read(8 << 20):
            yield piece


def _sync(folder: Path) -> None:
    """Sync a folder, so that a rename in it is durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


__all__ = ["BundleWriter"]
