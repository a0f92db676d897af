"""Ask the kernel to allocate or drop pages of a mapping.

This is done with ctypes because ``mmap.madvise`` holds the interpreter's lock meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Collection
from typing import ClassVar

_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14
_MAP_FIXED = 0x10
_CODE = b"/memfd:libffi"  # the code of ctypes' callbacks
MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14


@functools.cache
def _madvise() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _advise(address: int, size_bytes: int, advice: int) -> int:
    """Call madvise(2) and return 0 or an errno. The interpreter's lock is free meanwhile."""
    begin = address - address % mmap.PAGESIZE
    if _madvise()(begin, size_bytes + address - begin, advice) == 0:
        return 0
    return ctypes.get_errno()


def populate_write(address: int, size_bytes: int) -> bool:
    """Allocate pages of a mapping for writing. Return False if the kernel cannot; then each costs a fault later."""
    return _advise(address, size_bytes, _MADV_POPULATE_WRITE) == 0


def prefer_huge(address: int, size_bytes: int) -> None:
    """Ask for huge pages in a shared mapping. This works only where the kernel's shmem_enabled is ``advise``."""
    _advise(address, size_bytes, _MADV_HUGEPAGE)


def drop_pages(address: int, size_bytes: int) -> None:
    """Drop whole pages from this process's memory. A mapped file keeps them."""
    _advise(address, size_bytes, _MADV_DONTNEED)


class _PyBuffer(ctypes.Structure):
    """``Py_buffer`` of CPython's stable ABI. Only its first field is read."""

    _fields_: ClassVar = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


def address_of(memory: memoryview) -> int:
    """Return the address of a view's first byte, also of read-only memory; 0 for an empty view."""
    if not memory.nbytes:
        return 0
    held = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), ctypes.byref(held), 0)
    address = held.buf
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(held))
    return int(address or 0)


def prefault_private_pages() -> None:
    """Copy now the pages that a forked process shares with its parent, instead of by faults at the first writes.

    Mappings of which less than half exists, such as threads' stacks, are left alone. Before Linux 5.14, this does
    nothing.
    """
    private: list[tuple[int, int]] = []
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            name, *values = line.split()
            if "-" in name:
                start, stop = (int(each, 16) for each in name.split("-"))
                writable = values[0] == "rw-p"
            elif name == "Rss:" and writable and int(values[0]) << 11 >= stop - start:
                private.append((start, stop - start))
    for start, size_bytes in private:
        populate_write(start, size_bytes)


def unmap_memfds(keep: Collection[int]) -> None:
    """Unmap all memfds, which are mostly regions, except those with the inodes in ``keep``.

    Their addresses stay reserved, because the objects that own the mappings will unmap them once more.
    """
    map_at = ctypes.CDLL(None, use_errno=True).mmap
    map_at.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    with open("/proc/self/maps", "rb") as maps:
        found = [line.split(maxsplit=5) for line in maps if b" /memfd:" in line]
    for addresses, _, _, _, inode, name in found:
        if int(inode) not in keep and not name.startswith(_CODE):
            start, stop = (int(address, 16) for address in addresses.split(b"-"))
            map_at(start, stop - start, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1, 0)
