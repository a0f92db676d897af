"""Sleep until a word of shared memory changes, and wake the processes that sleep on it (futex(2)).

Polling would either be late or wake a thread often. Here each change costs the writer one system call.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import time
from collections.abc import Callable
from typing import ClassVar

_NUMBERS = {"x86_64": 202, "aarch64": 98}  # both little-endian: a futex's 4 bytes are the lower half of our words
_WAIT, _WAKE = 0, 1  # not the private ones: the other side is another process
_ALL = (1 << 31) - 1
_LOOK_S = 0.002  # between looks where there is no futex


class _TimeSpec(ctypes.Structure):
    _fields_: ClassVar = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


@functools.cache
def _futex() -> Callable[..., int] | None:
    """Return the system call, which frees the interpreter's lock meanwhile; None if its number is not known here."""
    number = _NUMBERS.get(os.uname().machine)
    if number is None:
        return None
    call = ctypes.CDLL(None, use_errno=True).syscall
    pointer = ctypes.c_void_p
    call.argtypes = (ctypes.c_long, pointer, ctypes.c_int, ctypes.c_uint32, pointer, pointer, ctypes.c_uint32)
    return functools.partial(call, number)


def wait_for_change(address: int, seen: int, timeout_s: float) -> None:
    """Sleep until ``wake_all`` is called for the 8-byte word at ``address``, at most for ``timeout_s``.

    Returns at once if the word's lower half differs from that of ``seen``. May return early.
    """
    if (futex := _futex()) is not None:
        limit = _TimeSpec(int(timeout_s), int(timeout_s % 1 * 1e9))
        if not futex(address, _WAIT, seen & 0xFFFFFFFF, ctypes.addressof(limit), None, 0):
            return
        if ctypes.get_errno() in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            return
    time.sleep(min(timeout_s, _LOOK_S))


def wake_all(address: int) -> None:
    """Wake all processes and threads that sleep on the 8-byte word at ``address``. Call it after a change."""
    if (futex := _futex()) is not None:
        futex(address, _WAKE, _ALL, None, None, 0)
