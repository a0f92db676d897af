"""The priority of loads on the same machine: background loads give way to interactive ones.

An interactive load holds a read lock on a file that all of them can open: this source file. The kernel drops the lock
when its holder ends, however it ends. Others can see whether it is held without taking it.
"""

from __future__ import annotations

import os
from typing import Self

from ..region.lock import is_locked, lock, unlock


class LoadPriority:
    """One load of this process. Other processes see whether an interactive one is under way."""

    def __init__(self, priority: str) -> None:
        self.background = True
        self._fd = os.open(__file__, os.O_RDONLY | os.O_CLOEXEC)
        if priority == "interactive":
            self.promote()

    def promote(self) -> None:
        """Count as interactive from now on."""
        self.background = False
        try:
            lock(self._fd, shared=True)
        except OSError:
            pass  # a file system without locks: all loads have the same priority

    def demote(self) -> None:
        """Count as a background load from now on."""
        self.background = True
        try:
            unlock(self._fd)
        except OSError:
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def is_interactive_load_running() -> bool:
    """Return whether an interactive load is under way on this machine."""
    fd = os.open(__file__, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return is_locked(fd)
    except OSError:
        return False
    finally:
        os.close(fd)
