"""A region's memory as its writer has it: mapped for reading and writing, and grown when the region is laid out."""

from __future__ import annotations

import ctypes
import mmap
import os

from .layout import HEADER_BYTES
from .pages import populate_write, prefer_huge


class WriterMemory:
    """The writer's mapping. ``bytes``: all of it; ``words``: the header's. Both are new after it has grown."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # Pages that exist already. Unmapping them takes a tenth of a fetch's time, so it is left to this object's end.
        self.reserved_bytes = 0
        self._map = mmap.mmap(fd, HEADER_BYTES)
        self._view()

    def _view(self) -> None:
        self._address = 0
        self.bytes = memoryview(self._map)
        self.words = self.bytes[:HEADER_BYTES].cast("Q")

    def grow(self, size_bytes: int) -> None:
        """Have at least this size, and map all of it."""
        if len(self._map) < size_bytes:
            os.ftruncate(self._fd, size_bytes)
            self.remap(size_bytes)

    def remap(self, size_bytes: int) -> None:
        """Map so much of the region as it is. What was mapped stays mapped, with its pages."""
        self.words.release()
        self.bytes.release()
        self._map.resize(size_bytes)
        self._view()

    @property
    def address(self) -> int:
        """Where the mapping begins."""
        self._address = self._address or ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        return self._address

    def prepare(self, offset: int, size_bytes: int) -> None:
        """Make these pages, of which bytes are about to come: at once they cost less than by a fault each."""
        if offset + size_bytes > self.reserved_bytes:
            populate_write(self.address + offset, size_bytes)

    def words_at(self, offset: int) -> memoryview:
        """One 8-byte word at an aligned offset."""
        return self.bytes[offset : offset + 8].cast("Q")

    def reserve(self, size_bytes: int) -> None:
        """Grow to this size and make the pages, which costs more than half of a fetch's CPU time."""
        if len(self._map) < size_bytes:
            self.grow(size_bytes)
            prefer_huge(self.address, size_bytes)
            populate_write(self.address, size_bytes)
            self.reserved_bytes = size_bytes

    def close(self) -> None:
        self.words.release()
        self.bytes.release()
        try:
            if not self.reserved_bytes:
                self._map.close()
        except BufferError:
            pass  # a thread that is ending still holds a piece
