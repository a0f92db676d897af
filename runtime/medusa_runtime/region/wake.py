"""Sleeping until a word of shared memory changes, and waking those who sleep (futex(2)).

Looks at intervals cost time, or a thread's wake-up each. Here each change costs the writer one system call.
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
    """Return the system call, during which the interpreter's lock is free; None where its number is not known."""
    number = _NUMBERS.get(os.uname().machine)
    if number is None:
        return None
    call = ctypes.CDLL(None, use_errno=True).syscall
    pointer = ctypes.c_void_p
    call.argtypes = (ctypes.c_long, pointer, ctypes.c_int, ctypes.c_uint32, pointer, pointer, ctypes.c_uint32)
    return functools.partial(call, number)


def wait_for_change(address: int, seen: int, timeout_s: float) -> None:
    """Sleep until somebody wakes the 8-byte word at ``address``, or for ``timeout_s``; perhaps less.

    Returns at once when the word's lower half is no longer that of ``seen``.
    """
    if (futex := _futex()) is not None:
        limit = _TimeSpec(int(timeout_s), int(timeout_s % 1 * 1e9))
        if not futex(address, _WAIT, seen & 0xFFFFFFFF, ctypes.addressof(limit), None, 0):
            return
        if ctypes.get_errno() in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            return
    time.sleep(min(timeout_s, _LOOK_S))


def wake_all(address: int) -> None:
    """Wake all who sleep on the 8-byte word at ``address``, which has changed."""
    if (futex := _futex()) is not None:
        futex(address, _WAKE, _ALL, None, None, 0)
