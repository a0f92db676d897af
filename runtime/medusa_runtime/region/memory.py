"""The writer's mapping of a region: for reading and writing, and grown when the region is laid out."""

from __future__ import annotations

import ctypes
import mmap
import os

from .layout import HEADER_BYTES
from .pages import populate_write, prefer_huge


class WriterMemory:
    """The writer's mapping of a region.

    ``bytes`` is all of it, and ``words`` the header. Both are replaced when the mapping grows.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # The size for which pages exist already. Unmapping them takes a tenth of a fetch's time, so ``close`` does not.
        self.reserved_bytes = 0
        self._map = mmap.mmap(fd, HEADER_BYTES)
        self._view()

    def _view(self) -> None:
        self._address = 0
        self.bytes = memoryview(self._map)
        self.words = self.bytes[:HEADER_BYTES].cast("Q")

    def grow(self, size_bytes: int) -> None:
        """Grow the memfd to at least this size, and map all of it."""
        if len(self._map) < size_bytes:
            os.ftruncate(self._fd, size_bytes)
            self.remap(size_bytes)

    def remap(self, size_bytes: int) -> None:
        """Map this much of the region, without changing its size. Pages that are mapped stay so."""
        self.words.release()
        self.bytes.release()
        self._map.resize(size_bytes)
        self._view()

    @property
    def address(self) -> int:
        """The address of the mapping."""
        self._address = self._address or ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        return self._address

    def prepare(self, offset: int, size_bytes: int) -> None:
        """Allocate pages for bytes that are about to come. All at once, they cost less than by a fault for each."""
        if offset + size_bytes > self.reserved_bytes:
            populate_write(self.address + offset, size_bytes)

    def words_at(self, offset: int) -> memoryview:
        """Return a view of one 8-byte word at an aligned offset."""
        return self.bytes[offset : offset + 8].cast("Q")

    def reserve(self, size_bytes: int) -> None:
        """Grow to this size and allocate the pages, which takes more than half of a fetch's CPU time."""
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
            pass  # a thread that is about to end still holds a view
