"""torch's memory pool for CUDA graphs, at an address of our choice.

Elsewhere torch's memory lies where the driver puts it, differently in each process. In this pool, what captured graphs
use besides named memory (what a step computes in between, cuBLAS' workspaces) has the same addresses whenever it is
mapped again. A start then has nothing to relocate there, and words of a graph that two captures do not explain are
right, too (Foundry, arXiv 2604.06664, keeps all of a process's memory in one such range).
"""

from __future__ import annotations

import ctypes
import logging
from contextlib import AbstractContextManager
from ctypes import c_int, c_uint64
from pathlib import Path
from typing import Any

import torch

from ...device.compiling import compiled
from ...errors import DeviceError
from ...state.graphs.blueprint import GRAPH_POOL, MemoryRange, RangeKind
from ...state.graphs.driver import CudaDriver
from ...state.graphs.placement import granularity, reserve

logger = logging.getLogger(__name__)

POOL_BASE = 0x6800_0000_0000  # above what PlacedMemory can need
OTHER_POOL_BASE = 0x5A00_0000_0000  # for the other capture; moved by another distance than named memory
_RESERVED_BYTES = 256 << 30  # of addresses, which take no memory
_SOURCE = Path(__file__).with_name("graph_pool.c")


class GraphPool:
    """A ``torch.cuda.MemPool`` whose segments lie one behind the other from a chosen address.

    It lives until its process ends, which captures graphs offline.
    """

    def __init__(self, driver: CudaDriver, base: int) -> None:
        """Reserve addresses from ``base``. The thread's current context must be the device's.

        Raises DeviceError where there is no C compiler, or the driver refuses.
        """
        granule = granularity(driver)
        self._start = reserve(driver, _RESERVED_BYTES, granule, base)
        if self._start != base:
            logger.warning("%#x is taken: graphs are captured with their pool at %#x instead", base, self._start)
        with compiled(_SOURCE) as library:
            self._native = ctypes.CDLL(str(library))
            self._native.medusa_pool_open.argtypes = (ctypes.c_char_p, c_uint64, c_uint64, c_uint64, c_int)
            self._native.medusa_pool_used.restype = c_uint64
            if self._native.medusa_pool_open(
                driver.file.encode(), self._start, _RESERVED_BYTES, granule, driver.current_device()
            ):
                raise DeviceError("the graphs' memory pool cannot be opened; expected the driver of CUDA 12.4 or newer")
            allocator = torch.cuda.memory.CUDAPluggableAllocator(str(library), "medusa_pool_malloc", "medusa_pool_free")
        self._pool = torch.cuda.MemPool(allocator.allocator())  # type: ignore[no-untyped-call]
        # Never freed: at the end of a process torch may free the allocator before the pool that calls it.
        for one in (allocator, self._pool):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))

    @property
    def id(self) -> Any:
        """What ``capture_begin`` takes as its pool."""
        return self._pool.id

    @property
    def memory_range(self) -> MemoryRange:
        """All of it that has been used so far, as one range."""
        used = int(self._native.medusa_pool_used())
        return MemoryRange(GRAPH_POOL, RangeKind.SLAB, self._start, used)

    def in_use(self) -> AbstractContextManager[None]:
        """Let this thread's new tensors and workspaces lie in the pool. No capture may begin or end meanwhile."""
        return torch.cuda.use_mem_pool(self._pool)


def open_pool(driver: CudaDriver, base: int) -> GraphPool | None:
    """The pool; None, with the reason in the log, where torch's own pool has to do: at no chosen address."""
    try:
        return GraphPool(driver, base)
    except (DeviceError, RuntimeError) as error:  # torch's, where it cannot make such a pool
        logger.warning("graphs are captured in memory at addresses that torch chooses: %s", error)
        return None


__all__ = ["OTHER_POOL_BASE", "POOL_BASE", "GraphPool", "open_pool"]
