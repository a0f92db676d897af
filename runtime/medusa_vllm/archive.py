"""Folders of files that a state bundle keeps as one blob: zip archives that name nothing of where they were made."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from medusa_runtime.errors import StateError

# Errors that zipfile raises for bytes that are not an archive, and for a damaged archive.
_DAMAGE_ERRORS: tuple[type[Exception], ...] = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    OSError,
    EOFError,
    OverflowError,
)
_DAMAGE_ERRORS += (KeyError, ValueError, RuntimeError)


class Archive(NamedTuple):
    """A format of such blobs.

    ``what`` is named in errors. ``top`` is the folder in the archive that has everything; another number at its end is
    another format.
    """

    what: str
    top: str

    def pack(self, folder: Path, blob: Path) -> Path:
        """Write the content of ``folder`` to the file ``blob``, and return it."""
        with zipfile.ZipFile(blob, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    archive.write(path, f"{self.top}/{path.relative_to(folder).as_posix()}")
        return blob

    def unpack(self, blob: bytes, folder: Path) -> Path:
        """Unpack into ``folder``, which is private to this process, and return the folder in it that has everything.

        Raises StateError if the blob is damaged or of another format, or if a file cannot be written. The engine then
        starts without it.
        """
        with self._open(blob) as archive:
            for name in archive.namelist():
                self._write(folder, name, archive.read(name))  # checks its CRC
        return folder / self.top

    def read(self, blob: bytes, name: str) -> bytes:
        """Read one of the packed files. Raises StateError."""
        with self._open(blob) as archive:
            return archive.read(f"{self.top}/{name}")

    @contextmanager
    def _open(self, blob: bytes) -> Iterator[zipfile.ZipFile]:
        try:
            with zipfile.ZipFile(io.BytesIO(blob)) as archive:
                yield archive
        except _DAMAGE_ERRORS as error:
            raise StateError(f"{self.what} cannot be read ({error}); materialize it again") from error

    def _write(self, folder: Path, name: str, data: bytes) -> None:
        parts = PurePosixPath(name).parts
        if len(parts) < 2 or parts[0] != self.top or ".." in parts:
            raise StateError(f"{self.what} holds {name!r}, expected files under {self.top}/; materialize it again")
        path = folder.joinpath(*parts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:  # not the blob's fault
            raise StateError(f"{self.what} cannot be unpacked ({error})") from error


__all__ = ["Archive"]
