"""Loads that run on one machine at the same time: background ones give way to interactive ones.

An interactive load holds a read lock while it lasts, on a file that all of them have: this one. The kernel drops the
lock when its holder ends, however it ends, and asking for it changes nothing.
"""

from __future__ import annotations

import fcntl
import os
import struct
from types import TracebackType
from typing import Self

from ..region.layout import FLOCK


class Load:
    """One load of this process. Others know of an interactive one while it lasts."""

    def __init__(self, priority: str) -> None:
        self.background = True
        self._fd = os.open(__file__, os.O_RDONLY | os.O_CLOEXEC)
        if priority == "interactive":
            self.promote()

    def promote(self) -> None:
        """Be interactive from now on."""
        self.background = False
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
        except OSError:
            pass  # a file system without locks: everybody has the same priority

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def interactive_load() -> bool:
    """Whether one is under way."""
    fd = os.open(__file__, os.O_RDONLY | os.O_CLOEXEC)
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        return bool(struct.unpack(FLOCK, answer)[0] != fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(fd)
