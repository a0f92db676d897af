"""The bytes of a region: its header's fields, its states, and the lock that tells whether a writer lives.

A region starts with one page of header. Its fields are 8-byte words that are stored through a memoryview of words:
an aligned store is one instruction, so no reader ever sees half of it (struct.pack_into writes byte by byte).
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from enum import IntEnum

HEADER_BYTES = 4096
ERROR_OFFSET = 1024
ERROR_BYTES = HEADER_BYTES - ERROR_OFFSET
DATA_ALIGN_BYTES = 2 << 20  # a huge page, where the kernel has them for shared memory


class State(IntEnum):
    """EMPTY → INDEXED (index and files can be read, data arrives) → DONE; FAILED from either."""

    EMPTY = 0
    INDEXED = 1
    DONE = 2
    FAILED = 3


class Late(IntEnum):
    """Of a file that comes after the index: whether it is there, or never will be."""

    PENDING = 0
    PRESENT = 1
    WITHHELD = 2


class Word(IntEnum):
    """The header's words. The watermark comes first: contiguous bytes in fetch order (ParaServe §5.1)."""

    WATERMARK = 0
    STATE = 1
    GENERATION = 2
    TOTAL_BYTES = 3
    FETCHED_BYTES = 4
    KEPT_BYTES = 5  # what this generation's writer found already there
    STARTED_NS = 6
    ENDED_NS = 7
    CHUNK_BYTES = 8
    CHUNK_COUNT = 9
    INDEX_OFFSET = 10
    INDEX_BYTES = 11
    FILES_OFFSET = 12
    FILES_BYTES = 13
    DATA_OFFSET = 14
    REGION_BYTES = 15
    ERROR_BYTES = 16
    RELEASED_BYTES = 17  # written by a reader that gives memory back as it goes; see releasing.py


RING_OFFSET, RING_WORDS = 512, 64  # requests of readers; see asking.py
TABLE_OFFSET = HEADER_BYTES  # the chunk table, one byte a chunk


def reopen(fd: int, flags: int) -> int:
    """The same memfd under a new open file description, so that its mode and its locks are its own."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


F_ADD_SEALS, F_GET_SEALS = 1033, 1034  # fcntl(2)
SEAL_SHRINK, SEAL_GROW, SEAL_WRITE, SEAL_FUTURE_WRITE = 0x2, 0x4, 0x8, 0x10

# struct flock on 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid. The lock is an "open file description" lock:
# the kernel drops it when its holder ends, however it ends, and it is seen across pid namespaces.
FLOCK = "hhxxxxqqixxxx"


def lock_for_writing(fd: int) -> bool:
    """Take the writer's lock on ``fd`` (which must be its own description); False when another writer has it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(fd: int) -> None:
    """Give the writer's lock back."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_UNLCK, os.SEEK_SET, 0, 1, 0))


def writer_lives(fd: int) -> bool:
    """Whether some writer holds the lock. ``fd`` is any other description of the region."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    return bool(struct.unpack(FLOCK, answer)[0] != fcntl.F_UNLCK)


class Waiter:
    """Sleeps between looks at shared memory: short at first, at most a millisecond. TimeoutError at the deadline."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._pause_s = 20e-6
        self._next_slow_look = self._began + 0.05

    def pause(self) -> None:
        if self._timeout_s is not None and time.monotonic() - self._began >= self._timeout_s:
            raise TimeoutError(f"nothing arrived in the region within {self._timeout_s:g} s")
        time.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 1.3, 1e-3)

    def slow_look(self) -> bool:
        """Whether it is time for a check that costs a system call: every 50 ms."""
        now = time.monotonic()
        if now < self._next_slow_look:
            return False
        self._next_slow_look = now + 0.05
        return True
