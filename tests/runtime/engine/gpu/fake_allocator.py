"""torch's end of an allocator in C, as its documentation describes it."""

from __future__ import annotations

import ctypes


class FakeAllocator:
    """torch.cuda.memory.CUDAPluggableAllocator: two functions of a library, which torch documents the types of."""

    def __init__(self, path: str, malloc: str, free: str) -> None:
        library = ctypes.CDLL(path)
        self.malloc, self.free = getattr(library, malloc), getattr(library, free)
        self.malloc.argtypes, self.malloc.restype = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        self.free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

    def allocator(self) -> FakeAllocator:
        return self
