"""A torch memory pool for CUDA graphs, at an address of our choice.

By default the driver chooses where torch's memory lies, and each process gets other addresses. In this pool, the
unnamed memory that captured graphs use (intermediate results, cuBLAS's workspaces) has the same addresses whenever it
is mapped again. A start then has nothing to relocate there, and even those words of a graph that two captures do not
explain stay valid. (Foundry, arXiv 2604.06664, keeps all of a process's memory in one such range.)
"""

from __future__ import annotations

import ctypes
import logging
from contextlib import AbstractContextManager
from ctypes import c_int, c_uint64
from pathlib import Path
from typing import Any

import torch

from ...device.compiling import compile_library
from ...errors import DeviceError
from ...state.graphs.blueprint import GRAPH_POOL, MemoryRange, RangeKind
from ...state.graphs.driver import CudaDriver
from ...state.graphs.placement import RESERVED_BYTES, granularity, reserve

logger = logging.getLogger(__name__)

POOL_BASE = 0x6800_0000_0000  # above what PlacedMemory can need
OTHER_POOL_BASE = 0x5A00_0000_0000  # for the second capture; shifted by another distance than named memory
_SOURCE = Path(__file__).with_name("graph_pool.c")


class GraphPool:
    """A ``torch.cuda.MemPool`` whose segments lie one after the other from a chosen address.

    It is for processes that capture graphs offline, and lives as long as the process.
    """

    def __init__(self, driver: CudaDriver, base: int) -> None:
        """Reserve addresses from ``base`` on. The calling thread's current context must be the device's.

        Raises DeviceError if there is no C compiler, or the driver refuses.
        """
        granule = granularity(driver)
        self._start = reserve(driver, RESERVED_BYTES, granule, base).start
        if self._start != base:
            logger.warning("%#x is taken: graphs are captured with their pool at %#x instead", base, self._start)
        with compile_library(_SOURCE) as library:
            self._native = ctypes.CDLL(str(library))
            self._native.medusa_pool_open.argtypes = (ctypes.c_char_p, c_uint64, c_uint64, c_uint64, c_int)
            self._native.medusa_pool_used.restype = c_uint64
            if self._native.medusa_pool_open(
                driver.file.encode(), self._start, RESERVED_BYTES, granule, driver.current_device()
            ):
                raise DeviceError("the graphs' memory pool cannot be opened; expected the driver of CUDA 12.4 or newer")
            allocator = torch.cuda.memory.CUDAPluggableAllocator(str(library), "medusa_pool_malloc", "medusa_pool_free")
        self._pool = torch.cuda.MemPool(allocator.allocator())  # type: ignore[no-untyped-call]
        # These are never freed: when a process ends, torch may free the allocator before the pool that calls it.
        for one in (allocator, self._pool):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))

    @property
    def id(self) -> Any:
        """The pool's id, as ``capture_begin`` takes it."""
        return self._pool.id

    @property
    def memory_range(self) -> MemoryRange:
        """The part of the pool that has been used so far, as one range."""
        used = int(self._native.medusa_pool_used())
        return MemoryRange(GRAPH_POOL, RangeKind.SLAB, self._start, used)

    def in_use(self) -> AbstractContextManager[None]:
        """Return a context manager in which this thread's new tensors and workspaces are allocated from the pool.

        No capture may begin or end inside it.
        """
        return torch.cuda.use_mem_pool(self._pool)


def open_pool(driver: CudaDriver, base: int) -> GraphPool | None:
    """Open the pool. If that fails, log the reason and return None; torch's own pool is used then."""
    try:
        return GraphPool(driver, base)
    # The latter are torch's: it cannot make such a pool, or this version of it has other names or arguments.
    except (DeviceError, RuntimeError, AttributeError, TypeError) as error:
        logger.warning("graphs are captured in memory at addresses that torch chooses: %s", error)
        return None


__all__ = ["OTHER_POOL_BASE", "POOL_BASE", "GraphPool", "open_pool"]
