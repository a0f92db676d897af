"""Seals of a region's memfd (fcntl(2)): what its size and its bytes are protected from."""

from __future__ import annotations

import fcntl

F_ADD_SEALS, F_GET_SEALS = 1033, 1034
SEAL_SHRINK, SEAL_GROW, SEAL_WRITE, SEAL_FUTURE_WRITE = 0x2, 0x4, 0x8, 0x10


def seal_size(fd: int) -> None:
    """Keep everybody from changing the memfd's size."""
    fcntl.fcntl(fd, F_ADD_SEALS, SEAL_SHRINK | SEAL_GROW)


def seal_to_others(fd: int) -> None:
    """Keep everybody from writing who does not have a writable mapping yet, and from changing the size."""
    fcntl.fcntl(fd, F_ADD_SEALS, SEAL_FUTURE_WRITE | SEAL_SHRINK | SEAL_GROW)


def seal_for_good(fd: int) -> None:
    """Keep everybody from changing the memfd at all, or from new mappings for writing where one exists."""
    for seals in (SEAL_WRITE | SEAL_SHRINK | SEAL_GROW, SEAL_FUTURE_WRITE | SEAL_SHRINK | SEAL_GROW):
        try:
            fcntl.fcntl(fd, F_ADD_SEALS, seals)
            return
        except OSError:
            continue  # somebody maps it for writing, or it is sealed already


def seals_of(fd: int) -> int:
    """Return the seals. OSError for a file that can have none."""
    return fcntl.fcntl(fd, F_GET_SEALS)
