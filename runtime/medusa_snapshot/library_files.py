"""Files that libraries keep open: libffi's own, from whose "static trampolines" it maps more for more callbacks.

A process that continues from a snapshot opens them under the same numbers, which nobody can tell the library to change.
"""

from __future__ import annotations

import os

from .conditions import mapped_files

TYPE_CHECKING = False  # typing takes several milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Mapping

_NUMBER = 200  # parents hand on lower ones


def open_high() -> None:
    """Let libraries open their files under high numbers. The process that will be saved calls this first."""
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while taken[-1] < _NUMBER:
            taken.append(os.dup(taken[0]))
        import ctypes

        ctypes.CFUNCTYPE(None)(int)
    finally:
        for number in taken:
            os.close(number)


def is_kept(path: str) -> bool:
    """Return whether an open file is one that a library keeps open, and not one that this process works with."""
    return path in mapped_files() and os.path.exists(path)


def reopen(kept: Mapping[int, str]) -> str | None:
    """Open the files under their numbers. Returns the reason if one of these is taken or above the limit."""
    import fcntl

    for number, path in kept.items():
        opened = os.open(path, os.O_RDONLY)
        try:
            found = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, number)  # or the next that is free
        except OSError:
            found = -1  # the limit is below
        os.close(opened)
        if found != number:
            return f"it needs the descriptor {number} for {path}, which is taken or above the limit for open files"
    return None
