"""Seals (fcntl(2)), which protect the size and the bytes of a region's memfd."""

from __future__ import annotations

import fcntl

F_ADD_SEALS, F_GET_SEALS = 1033, 1034
SEAL_SEAL, SEAL_SHRINK, SEAL_GROW, SEAL_WRITE, SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x8, 0x10


def seal_size(fd: int) -> None:
    """Forbid all changes of the memfd's size, and further seals."""
    fcntl.fcntl(fd, F_ADD_SEALS, SEAL_SHRINK | SEAL_GROW | SEAL_SEAL)


def seal_to_others(fd: int) -> None:
    """Forbid writing, except through writable mappings that already exist, and changes of the size."""
    fcntl.fcntl(fd, F_ADD_SEALS, SEAL_FUTURE_WRITE | SEAL_SHRINK | SEAL_GROW)


def seal_for_good(fd: int) -> None:
    """Forbid all changes of the memfd. If it is still mapped for writing, forbid at least other ways to write."""
    for seals in (SEAL_WRITE | SEAL_SHRINK | SEAL_GROW, SEAL_FUTURE_WRITE | SEAL_SHRINK | SEAL_GROW):
        try:
            fcntl.fcntl(fd, F_ADD_SEALS, seals)
            return
        except OSError:
            continue  # a process maps it for writing, or its seals can no longer be changed


def seals_of(fd: int) -> int:
    """Return the seals, as a bit mask. Raises OSError for a file that cannot have seals."""
    return fcntl.fcntl(fd, F_GET_SEALS)
