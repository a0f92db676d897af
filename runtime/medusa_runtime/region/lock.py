"""Locks on a file, which the kernel drops when their holder ends, however it ends.

They are "open file description" locks (fcntl(2)). They work across PID namespaces, and belong to a file description
instead of a process.
"""

from __future__ import annotations

import fcntl
import os
import struct

# struct flock on 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = "hhxxxxqqixxxx"


def lock(fd: int, *, shared: bool = False) -> bool:
    """Take the lock on a file, exclusively or ``shared``. Return False if another holder prevents it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_RDLCK if shared else fcntl.F_WRLCK))
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(fd: int) -> None:
    """Release the lock."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK))


def is_locked(fd: int) -> bool:
    """Return whether the lock is held, exclusively or shared, by another file description than that of ``fd``."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK))
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _request(kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 1, 0)
