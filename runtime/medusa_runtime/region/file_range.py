"""Bytes of a region as a part of an open file, for those who read them and do not map them."""

from __future__ import annotations

import os
from typing import NamedTuple


class OpenFile:
    """A file's descriptor, which is closed with the last reference to it."""

    def __init__(self, fd: int) -> None:
        """Take over ``fd``."""
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def __del__(self) -> None:
        os.close(self._fd)


class FileRange(NamedTuple):
    """The bytes of an open file from ``offset`` on."""

    file: OpenFile
    offset: int


__all__ = ["FileRange", "OpenFile"]
