"""The store for files on this machine, which readers map in place instead of copying them."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..errors import ForbiddenError, ObjectChangedError, ObjectNotFoundError, StorageError
from .base import Advance, ObjectInfo, redacted, scheme_of

OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # non-blocking, or a FIFO would wait for a writer
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # a model's name on huggingface.co: organisation/name
_SLIP = re.compile(r"(s3|https?|hf|gs|az|abfs):/?(?!/)")  # the beginning of a URL that lacks slashes


class LocalStore:
    """A folder, given as a path or a file:// URL."""

    reuses_buffer = False
    interruptible = True

    def __init__(self, url: str, *, holds: str = "a checkpoint", check: bool = True) -> None:
        """Raises ObjectNotFoundError if there is no folder at ``url``, unless ``check`` is False.

        ``holds`` says in the error what was expected in it.
        """
        self.url = url
        path = unquote(urlsplit(url).path) if scheme_of(url) else url
        self._folder = Path(path).expanduser().absolute()
        if check and not self._folder.is_dir():
            found = "a file" if self._folder.exists() else "nothing"
            meant, shown = "", str(self._folder)
            if found == "nothing" and (slip := _SLIP.match(url)):
                address = f"{slip[1]}://{url[slip.end() :]}"
                meant = f"; did you mean {redacted(address)}?"
                shown = shown if redacted(address) == address else f"{slip[1]}:…"  # it holds a password or a signature
            elif found == "nothing" and _HUB_NAME.fullmatch(url):
                meant = f"; did you mean hf://{url}?"
            raise ObjectNotFoundError(f"{shown}: expected a folder with {holds}, found {found}{meant}")

    def descriptor(self, key: str) -> int:
        """Open the object's file, and return the descriptor, which the caller closes."""
        path = self._folder / key
        try:
            fd = self._open_file(key)
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectNotFoundError(f"{path}: no such file") from None
        except PermissionError:
            raise ForbiddenError(f"{path} may not be read by user {os.getuid()}; change its permissions") from None
        except OSError as error:
            if error.errno == errno.ENXIO:
                raise ForbiddenError(f"{path}: expected a regular file, found a socket or an unknown device") from None
            raise StorageError(f"{path} cannot be opened: {error.strerror}") from None
        if not stat.S_ISREG(mode := os.fstat(fd).st_mode):
            os.close(fd)
            found = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device"
            raise ForbiddenError(f"{path}: expected a regular file, found {found}")
        return fd

    def _open_file(self, key: str) -> int:
        return os.open(self._folder / key, OPEN_FLAGS)

    def stat(self, key: str) -> ObjectInfo:
        fd = self.descriptor(key)
        try:
            return _info(fd)
        finally:
            os.close(fd)

    def read(self, key: str, start: int, stop: int, version: str | None = None) -> tuple[bytes, ObjectInfo]:
        fd = self.descriptor(key)
        try:
            info = _info(fd)
            self._check(key, info, version)
            buffer = bytearray(max(min(stop, info.size) - start, 0))
            self._fill(fd, key, start, memoryview(buffer))
            self._check(key, _info(fd), info.version)  # again: it may be written to in place while it is read
            return bytes(buffer), info
        finally:
            os.close(fd)

    def read_into(
        self,
        key: str,
        start: int,
        buffer: memoryview,
        version: str | None = None,
        advance: Advance | None = None,
        length: int | None = None,
    ) -> None:
        fd = self.descriptor(key)
        try:
            info = _info(fd)
            self._check(key, info, version)
            self._fill(fd, key, start, buffer)
            self._check(key, _info(fd), info.version)
        finally:
            os.close(fd)
        if advance:
            advance(len(buffer))

    def _fill(self, fd: int, key: str, start: int, buffer: memoryview) -> None:
        filled = 0
        while filled < len(buffer):
            try:
                count = os.preadv(fd, [buffer[filled:]], start + filled)
            except OSError as error:
                raise StorageError(f"{self._folder / key} cannot be read: {error.strerror}") from None
            if not count:
                raise ObjectChangedError(f"{self._folder / key} became shorter while it was read; start again")
            filled += count

    def _check(self, key: str, info: ObjectInfo, version: str | None) -> None:
        if version is not None and info.version != version:
            raise ObjectChangedError(f"{self._folder / key} was replaced or written to while it was read; start again")

    def interrupt(self, thread: int) -> None: ...

    def local_path(self, key: str) -> Path:
        return self._folder / key

    def close(self) -> None: ...


def _info(fd: int) -> ObjectInfo:
    status = os.fstat(fd)
    return ObjectInfo(status.st_size, file_version(status))


def file_version(status: os.stat_result) -> str:
    """Return the version of a local file: its inode, size and time of change."""
    return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"
