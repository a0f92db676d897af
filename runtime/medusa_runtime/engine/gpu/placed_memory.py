"""Device memory at chosen addresses, so that a graph's pointers are valid in another process too.

Ranges lie one after the other from a fixed base, in one reservation. Their sizes and order are the same offline and in
a start, and so are their addresses. Only if the base is taken do they lie elsewhere, and pointers are relocated.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ...errors import DeviceError
from ...state.graphs.blueprint import MemoryRange, RangeKind
from ...state.graphs.driver import CudaDriver
from ...state.graphs.mismatch import GraphMismatch
from ...state.graphs.placement import RESERVED_BYTES, Placement, granularity, place, reserve

logger = logging.getLogger(__name__)

BASE = 0x6000_0000_0000  # a process's own mappings are at 0x55.. and 0x7f..
OTHER_BASE = 0x5000_0000_0000  # for the second capture: words that differ between the two are pointers
_GRANULE = 2 << 20
_GAP = 64 << 20  # so that a pointer past the end of a range does not point into another range


class PlacedMemory:
    """A ``Memory`` that maps each range at a chosen address, until ``free`` or the end of the process."""

    def __init__(self, driver: CudaDriver, device: torch.device, base: int = BASE) -> None:
        """Place memory from the address ``base`` on. The calling thread's current context must be the device's.

        Raises DeviceError if the driver refuses.
        """
        self.driver = driver
        self._context = driver.current_context()
        self.ranges: dict[str, MemoryRange] = {}
        self.device = device
        self._reserved = reserve(driver, RESERVED_BYTES, granularity(driver), base)
        if self._reserved.start != base:
            logger.info("%#x is taken: memory is placed from %#x on instead", base, self._reserved.start)
        self._next = self._reserved.start
        self._placements: dict[str, Placement] = {}

    def __call__(self, name: str, size_bytes: int) -> Tensor:
        """Map a new range under this name, and return it as uint8 [size_bytes], uninitialized.

        Raises DeviceError if the GPU has too little memory, or the name is taken.
        """
        if name in self.ranges:
            raise DeviceError(f"expected to map {name} once, asked to map it again")
        self.make_current()
        memory_range = MemoryRange(name, RangeKind.NAMED, self._next, max(size_bytes, 1))
        try:
            placement = place(self.driver, [memory_range], reserved=True)
        except GraphMismatch as mismatch:
            raise DeviceError(
                f"the {name} cannot be placed: {mismatch}; use a larger GPU, or end what else runs on this one"
            ) from mismatch
        self._placements[name] = placement
        address = placement.addresses[name]
        self.ranges[name] = memory_range._replace(address=address)
        self._next += -(-memory_range.size // _GRANULE) * _GRANULE + _GAP
        return tensor_at(address, memory_range.size, self.device)

    def free(self, name: str) -> None:
        """Unmap the range of this name, if there is one. Its addresses are not used again."""
        if self.ranges.pop(name, None) is not None:
            self.make_current()
            self._placements.pop(name).close()

    def make_current(self) -> None:
        """Make the device's context current in this thread, which may not have used the device yet."""
        self.driver.call("cuCtxSetCurrent", self._context)


def tensor_at(address: int, size_bytes: int, device: torch.device) -> Tensor:
    """Make a tensor uint8 [size_bytes] over memory that the caller owns. Raises DeviceError if torch cannot."""
    construct = getattr(torch._C, "_construct_storage_from_data_pointer", None)  # a private name
    if construct is None:
        raise DeviceError(
            f"expected a torch that makes tensors of device memory, found {torch.__version__}; install torch 2.13"
        )
    storage = construct(address, device, size_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size_bytes,), (1,))
