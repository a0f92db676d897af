"""A folder on this machine, given as an open descriptor. Files are looked up below that folder only."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading

from ..errors import ForbiddenError
from .local import OPEN_FLAGS, LocalStore

_SYS_OPENAT2 = 437  # openat2(2), the same number on every architecture; since Linux 5.6
_NO_MAGIC_LINKS, _BENEATH = 0x02, 0x08


class FolderStore(LocalStore):
    """Reads the files of a folder that another process has opened. Each file is opened once.

    With ``confined``, no link may lead out of the folder. Otherwise links are followed with this process's rights.
    """

    def __init__(self, url: str, descriptor: int, *, confined: bool) -> None:
        super().__init__(url, check=False)
        self._descriptor = descriptor
        self._resolve = _NO_MAGIC_LINKS | (_BENEATH if confined else 0)
        self._confined = confined
        self._opened: dict[str, int] = {}
        self._lock = threading.Lock()

    def _open_file(self, key: str) -> int:
        """Return a descriptor that the caller closes. A second call returns the same file, even if it was replaced."""
        with self._lock:
            if key not in self._opened:
                self._opened[key] = self._open_below(key)
            return os.dup(self._opened[key])

    def _open_below(self, key: str) -> int:
        fd = _openat2(self._descriptor, key, self._resolve)
        if fd is None:
            if self._confined:
                why = "this kernel has no openat2, or a seccomp profile forbids it"
                raise ForbiddenError(f"{key} cannot be opened below a folder alone: {why}")
            return os.open(key, OPEN_FLAGS, dir_fd=self._descriptor)
        return fd

    def close(self) -> None:
        with self._lock:
            for descriptor in self._opened.values():
                os.close(descriptor)
            self._opened.clear()


def _openat2(folder: int, name: str, resolve: int) -> int | None:
    """Open a file and return its descriptor; None where the kernel has no openat2. Raises OSError.

    EPERM is how seccomp profiles refuse a call that is newer than they are, such as those of old versions of Docker.
    """
    how = struct.pack("QQQ", OPEN_FLAGS, 0, resolve)
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(_SYS_OPENAT2, folder, os.fsencode(name), how, len(how))
    if fd >= 0:
        return int(fd)
    failed = ctypes.get_errno()
    if failed in (errno.ENOSYS, errno.EPERM):
        return None
    if failed in (errno.EXDEV, errno.ELOOP):
        raise PermissionError(failed, os.strerror(failed), name)
    raise OSError(failed, os.strerror(failed), name)
