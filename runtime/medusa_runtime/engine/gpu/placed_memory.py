"""Device memory at chosen addresses, so that a graph's pointers are right again in another process.

Ranges lie one after the other from a fixed base. Their sizes and order are the same offline and online, and so are the
addresses, unless one is taken: then that range lies elsewhere, and pointers into it are relocated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import DeviceError
from ...state.graphs.blueprint import MemoryRange, RangeKind
from ...state.graphs.driver import CudaDriver
from ...state.graphs.mismatch import GraphMismatch
from ...state.graphs.placement import Placement, place

BASE = 0x6000_0000_0000  # a process' own mappings are at 0x55.. and 0x7f..
OTHER_BASE = 0x5000_0000_0000  # for the other capture, which proves what is a pointer
_GRANULE = 2 << 20
_GAP = 64 << 20  # so that a pointer past the end of a range is in no other range


class PlacedMemory:
    """A ``Memory`` at chosen addresses. Its tensors stay mapped as long as it lives."""

    def __init__(self, driver: CudaDriver, device: torch.device, base: int = BASE) -> None:
        """Start at ``base``. The thread's current context must be the device's."""
        self.driver = driver
        self._context = driver.current_context()
        self.ranges: dict[str, MemoryRange] = {}
        self.device = device
        self._next = base
        self._placements: list[Placement] = []

    def __call__(self, name: str, size_bytes: int) -> Tensor:
        """Map uint8 [size_bytes], not cleared. Raises DeviceError when the GPU has too little memory."""
        if name in self.ranges:
            raise DeviceError(f"expected to map {name} once, asked to map it again")
        self.make_current()
        memory_range = MemoryRange(name, RangeKind.NAMED, self._next, max(size_bytes, 1))
        try:
            placement = place(self.driver, [memory_range])
        except GraphMismatch as mismatch:
            raise DeviceError(
                f"the {name} cannot be placed: {mismatch}; use a larger GPU, or end what else runs on this one"
            ) from mismatch
        self._placements.append(placement)
        address = placement.addresses[name]
        self.ranges[name] = memory_range._replace(address=address)
        self._next += -(-memory_range.size // _GRANULE) * _GRANULE + _GAP
        return tensor_at(address, memory_range.size, self.device)

    def make_current(self) -> None:
        """Make the context current in this thread, which may not have used the device yet."""
        self.driver.call("cuCtxSetCurrent", self._context)


def tensor_at(address: int, size_bytes: int, device: torch.device) -> Tensor:
    """A uint8 tensor [size_bytes] over memory that the caller owns. Raises DeviceError where torch cannot make one."""
    construct = getattr(torch._C, "_construct_storage_from_data_pointer", None)  # a private name
    if construct is None:
        raise DeviceError(
            f"expected a torch that makes tensors of device memory, found {torch.__version__}; install torch 2.13"
        )
    storage = construct(address, device, size_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size_bytes,), (1,))
