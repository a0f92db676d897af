"""What the kernel knows of a caller's descriptor by itself, without asking the file system behind it.

That may be the caller's own (FUSE), which never answers: the agent would stand still.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import NamedTuple

from ...errors import NodeRefusedError

_AT_EMPTY_PATH, _AT_STATX_DONT_SYNC = 0x1000, 0x4000
_STATX_TYPE, _STATX_INO = 0x1, 0x100
_STATX = struct.Struct("=28xH2xQ96xII")  # the beginning of struct statx: mode, number, device


class FileStatus(NamedTuple):
    """The kind of a file, as in ``st_mode``, its device and its number."""

    mode: int
    device: int
    number: int


def file_status(descriptor: int) -> FileStatus:
    """Look at an open file. Raises NodeRefusedError where its file system refuses that to the agent."""
    try:
        return _file_status(descriptor)
    except OSError as error:
        raise NodeRefusedError(f"a descriptor cannot be looked at: {error.strerror}; expected another file") from None


def _file_status(descriptor: int) -> FileStatus:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "statx"):
        found = os.fstat(descriptor)
        return FileStatus(found.st_mode, found.st_dev, found.st_ino)
    buffer = ctypes.create_string_buffer(256)
    if libc.statx(descriptor, b"", _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, _STATX_TYPE | _STATX_INO, buffer):
        failed = ctypes.get_errno()
        raise OSError(failed, os.strerror(failed))
    mode, number, major, minor = _STATX.unpack_from(buffer.raw)
    return FileStatus(mode, os.makedev(major, minor), number)
