"""Write a state bundle into a folder: the blobs first, the manifest last, so that readers never see half a bundle."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ...errors import ConfigError, StateError, StorageError
from ..kinds import is_code
from .held_folder import HeldFolder
from .locate import BLOBS, MANIFEST, read_manifest
from .manifest import Artifact, Manifest
from .own_mark import make_mark

if TYPE_CHECKING:
    from .signing import Signer

logger = logging.getLogger(__name__)

# Inline blobs stay small, so that all together take a store less time to send than a round trip.
_MOST_INLINE_BYTES = 96 << 10
_PART = ".part"
_BLOB = re.compile(r"[0-9a-f]{64}|\w+\.part")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class BundleWriter:
    """The only writer of a bundle, as long as the context lasts.

    If it is killed at any point, the bundle is as before, with some files at most that the next commit removes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder_fd = self._blobs_fd = -1  # the first one holds the lock
        self._made_folder = False

    def __enter__(self) -> Self:
        """Lock the folder. Raises ConfigError if it cannot be written to, and StateError while another process does."""
        self._made_folder = not self._folder.exists()
        try:
            (self._folder / BLOBS).mkdir(parents=True, exist_ok=True)
            self._folder_fd = os.open(self._folder, _FOLDER_FLAGS)
            self._blobs_fd = os.open(BLOBS, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=self._folder_fd)
            fcntl.flock(self._folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(self._create(f"probe{_PART}", self._blobs_fd))
            os.unlink(f"probe{_PART}", dir_fd=self._blobs_fd)
            if (self._folder / MANIFEST).is_dir():  # anything else is replaced
                raise IsADirectoryError(errno.EISDIR, f"{MANIFEST} is a folder")
        except BlockingIOError:
            self._close()
            raise StateError(f"{self._folder}: another medusa materialize is writing there; wait for it") from None
        except OSError as error:
            self._close()
            linked = (self._folder / BLOBS).is_symlink()
            raise ConfigError(
                f"{self._folder}: the bundle cannot be written there "
                f"({f'{BLOBS} is a link' if linked else error.strerror}); expected a writable folder, "
                "choose another with --out"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
        self._close()

    def _close(self) -> None:
        for descriptor in (self._folder_fd, self._blobs_fd):
            if descriptor >= 0:
                os.close(descriptor)  # this releases the lock
        self._folder_fd = self._blobs_fd = -1

    def discard(self) -> None:
        """Remove all files that the committed manifest does not name, and the folder if this writer made it."""
        self._keep_only(self.existing())
        with suppress(FileNotFoundError):
            os.unlink(f"{MANIFEST}{_PART}", dir_fd=self._folder_fd)
        if self._made_folder:
            with suppress(OSError):  # it is not empty
                (self._folder / BLOBS).rmdir()
                self._folder.rmdir()

    def existing(self) -> Manifest:
        """Read the present manifest. If there is none, or it cannot be read, return an empty one."""
        try:
            with closing(HeldFolder(os.dup(self._folder_fd))) as folder:
                text = read_manifest(folder, "")
            return Manifest(()) if text is None else Manifest.parse(text)
        except (StorageError, StateError):
            return Manifest(())

    @property
    def place(self) -> str:
        """The folder's path without links."""
        return os.readlink(f"/proc/self/fd/{self._folder_fd}")

    def add(self, kind: str, key: dict[str, str], data: bytes | Path) -> Artifact:
        """Write a blob. It belongs to the bundle once a committed manifest names it."""
        part = f"{os.getpid()}{_PART}"
        digest = hashlib.sha256()
        size = 0
        inline: bytes | None = b""
        with open(self._create(part, self._blobs_fd), "wb") as target:
            for piece in _pieces(data):
                digest.update(piece)
                target.write(piece)
                size += len(piece)
                inline = None if inline is None or size > _MOST_INLINE_BYTES else inline + piece
            target.flush()
            os.fsync(target.fileno())
        os.replace(part, digest.hexdigest(), src_dir_fd=self._blobs_fd, dst_dir_fd=self._blobs_fd)
        return Artifact(kind, key, digest.hexdigest(), size, inline)

    def commit(self, manifest: Manifest, signer: Signer | None = None) -> None:
        """Make this the bundle's content, in one step. Blobs that it no longer names are removed afterwards.

        If there is code in it, the manifest gets this user's mark, so that this user's starts may run it.
        """
        text = self._text(manifest, signer)
        os.fsync(self._blobs_fd)  # so that the renames in it are durable
        part = f"{MANIFEST}{_PART}"
        with open(self._create(part, self._folder_fd), "wb") as target:
            target.write(text)
            target.flush()
            os.fsync(target.fileno())
        os.replace(part, MANIFEST, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)
        os.fsync(self._folder_fd)
        self._keep_only(manifest)

    def _text(self, manifest: Manifest, signer: Signer | None) -> bytes:
        if not any(is_code(artifact.kind) for artifact in manifest.artifacts):
            return manifest.to_json(signer)
        try:
            return manifest.to_json(signer, make_mark)
        except StateError as error:
            logger.warning("starts use the code in %s only with --trust-state or --trust-key: %s", self._folder, error)
            return manifest.to_json(signer)

    @staticmethod
    def _create(name: str, folder_fd: int) -> int:
        """Make a new file, and return its descriptor.

        What has this name goes: a killed writer left it, or it is a link of someone who may write to the folder.
        """
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder_fd)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o666, dir_fd=folder_fd)

    def _keep_only(self, manifest: Manifest) -> None:
        """Remove the blobs that a manifest does not name, and parts of blobs. Nothing else is a bundle's."""
        named = {artifact.sha256 for artifact in manifest.artifacts}
        for name in os.listdir(self._blobs_fd):
            if name not in named and _BLOB.fullmatch(name):
                with suppress(OSError):
                    os.unlink(name, dir_fd=self._blobs_fd)


def _pieces(data: bytes | Path) -> Iterable[bytes]:
    if isinstance(data, bytes):
        yield data
        return
    with open(data, "rb") as source:
        while piece := source.read(8 << 20):
            yield piece


__all__ = ["BundleWriter"]
