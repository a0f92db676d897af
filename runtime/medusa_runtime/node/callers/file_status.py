"""The status of a caller's files, whose file system may be the caller's own (FUSE), and never answer.

What the kernel knows by itself is found without asking that file system, because the agent would stand still. Other
questions are asked in a thread.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ...errors import NodeRefusedError
from ...storage.retry import NoAnswerError, call_within

MOST_THREADS = 64  # of the agent, most of which wait for callers' file systems
_ANSWER_WITHIN_S, _QUICK_S, _NOT_ASKED_S = 0.25, 0.05, 60.0
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


class Patience:
    """Limits for how long the agent waits for its callers' file systems. It does nothing else meanwhile.

    A user whose file system was slow is not asked for a minute. All of them together, who may be one person with many
    users, are waited for at most a fifth of the time.
    """

    def __init__(self) -> None:
        self._slow_until: dict[int, float] = {}
        self._all_until = 0.0

    def ask(self, user: int, question: Callable[[], bool]) -> bool | None:
        """Call a function that asks a user's file system; None if there is no answer soon, or none is waited for."""
        began = time.monotonic()
        if began < max(self._all_until, self._slow_until.get(user, 0.0)):
            return None
        answer = _ask_in_thread(question, _ANSWER_WITHIN_S)
        ended = time.monotonic()
        if ended - began > _QUICK_S:
            self._slow_until = {one: until for one, until in self._slow_until.items() if until > ended}
            self._slow_until[user] = ended + _NOT_ASKED_S
            self._all_until = ended + 4 * (ended - began)
        return answer


PATIENCE = Patience()  # of this process


def _ask_in_thread(question: Callable[[], bool], timeout_s: float) -> bool | None:
    # The thread of an unanswered question stays, so there is no answer either while there are too many of them.
    if threading.active_count() >= MOST_THREADS:
        return None
    try:
        return call_within(timeout_s, question)
    except (NoAnswerError, RuntimeError):  # RuntimeError: there is no room for a thread
        return None


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
