"""Device memory by name, at the addresses at which it was when captured, or elsewhere where those are taken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from ctypes import byref, c_size_t, c_uint64
from typing import NamedTuple

from .blueprint import Blueprints, MemoryRange, Relocation, TraceEvent
from .driver import OUT_OF_MEMORY, CudaDriver, CudaError
from .mismatch import GraphMismatch, Reason
from .structs import MemAccessDesc, MemAllocationProp, MemLocation

logger = logging.getLogger(__name__)

_DEVICE, _PINNED, _READ_WRITE = 1, 1, 3


class _Span(NamedTuple):
    """One reservation; regions on one page share it."""

    start: int
    size: int
    regions: list[MemoryRange]


class Placement:
    """Where regions are: name → ``addresses``. A context manager; closing unmaps what was mapped here.

    In the paper's mode (``replayed``, MEDUSA §4.2) ``allocations`` holds what each replayed allocation returned, and a
    pointer goes by its allocation rather than by its region.
    """

    def __init__(self, driver: CudaDriver, addresses: dict[str, int], allocations: Sequence[int] = ()) -> None:
        self.addresses = addresses
        self.allocations = allocations
        self._driver = driver
        self._mapped: list[tuple[int, int, int]] = []  # address, size, handle

    def __enter__(self) -> Placement:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, relocation: Relocation, region: MemoryRange) -> int:
        """Where this pointer points to now. GraphMismatch when its region is nowhere."""
        if self.allocations and relocation.allocation >= 0:
            return self.allocations[relocation.allocation] + relocation.allocation_offset
        if region.name not in self.addresses:
            raise GraphMismatch(Reason.REGION, f"{region.name} was not placed")
        return self.addresses[region.name] + relocation.offset

    def map(self, span: _Span, handle: int, address: int) -> None:
        try:
            self._driver.call("cuMemMap", address, span.size, 0, handle, 0)
        except CudaError:
            self._driver.result("cuMemAddressFree", address, span.size)
            self._driver.result("cuMemRelease", handle)
            raise
        self._mapped.append((address, span.size, handle))
        access = MemAccessDesc(MemLocation(_DEVICE, self._driver.current_device()), _READ_WRITE)
        self._driver.call("cuMemSetAccess", address, span.size, byref(access), 1)
        for region in span.regions:
            self.addresses[region.name] = address + region.address - span.start

    def close(self) -> None:
        while self._mapped:
            address, size, handle = self._mapped.pop()
            self._driver.result("cuMemUnmap", address, size)
            self._driver.result("cuMemAddressFree", address, size)
            self._driver.result("cuMemRelease", handle)


def place(
    driver: CudaDriver,
    regions: Iterable[MemoryRange],
    *,
    at_recorded: bool = True,
    placed: dict[str, int] | None = None,
) -> Placement:
    """Map every region that is not in ``placed`` (name → address), each at its captured address if that is free.

    A taken address is no failure: the region lies elsewhere and its pointers are relocated. GraphMismatch when the
    device has too little free memory; then nothing stays mapped.
    """
    placement = Placement(driver, dict(placed or {}))
    device = driver.current_device()
    prop = MemAllocationProp(type=_PINNED, location=MemLocation(_DEVICE, device))
    granule = c_size_t()
    driver.call("cuMemGetAllocationGranularity", byref(granule), byref(prop), 0)
    spans = _spans([region for region in regions if region.name not in placement.addresses], granule.value)
    needed, free, total = sum(span.size for span in spans), c_size_t(), c_size_t()
    driver.call("cuMemGetInfo_v2", byref(free), byref(total))
    if needed > free.value:
        raise GraphMismatch(Reason.MEMORY, f"expected {needed >> 20} MiB of free memory, found {free.value >> 20} MiB")
    try:
        for span in spans:
            address, handle = c_uint64(), c_uint64()
            wanted = span.start if at_recorded else 0
            if driver.result("cuMemAddressReserve", byref(address), span.size, granule.value, wanted, 0):
                driver.call("cuMemAddressReserve", byref(address), span.size, granule.value, 0, 0)
            if address.value != span.start and at_recorded:
                names = ", ".join(region.name for region in span.regions)
                logger.info("%#x is taken: %s is at %#x instead", span.start, names, address.value)
            try:
                driver.call("cuMemCreate", byref(handle), span.size, byref(prop), 0)
            except CudaError:
                driver.result("cuMemAddressFree", address.value, span.size)
                raise
            placement.map(span, handle.value, address.value)
    except CudaError as error:
        placement.close()
        reason = Reason.MEMORY if error.result == OUT_OF_MEMORY else Reason.DRIVER_CALL
        raise GraphMismatch(reason, str(error)) from error
    return placement


def _spans(regions: Sequence[MemoryRange], granule: int) -> list[_Span]:
    """Whole granules, one span where regions share one."""
    spans: list[_Span] = []
    for region in sorted(regions, key=lambda region: region.address):
        start = region.address // granule * granule
        stop = -(-(region.address + max(region.size, 1)) // granule) * granule
        if spans and start < spans[-1].start + spans[-1].size:
            last = spans.pop()
            spans.append(_Span(last.start, max(stop, last.start + last.size) - last.start, [*last.regions, region]))
        else:
            spans.append(_Span(start, stop - start, [region]))
    return spans


def replayed(
    driver: CudaDriver,
    blueprints: Blueprints,
    malloc: Callable[[int], int],
    free: Callable[[int], None],
    placed: dict[str, int] | None = None,
) -> Placement:
    """The paper's mode: repeat the recorded (de)allocations and take the addresses that they return (MEDUSA §4.2).

    ``malloc(size) → address`` and ``free(address)`` are the allocator's own, as ``raw_alloc`` and ``raw_delete`` of
    torch's; what they give stays allocated. ``placed``: regions that are not allocations of the trace.
    """
    return Placement(driver, dict(placed or {}), replay_allocations(blueprints.events, malloc, free))


def replay_allocations(
    events: Iterable[TraceEvent], malloc: Callable[[int], int], free: Callable[[int], None]
) -> list[int]:
    addresses: list[int] = []
    for event in events:
        if event.size:
            addresses.append(malloc(event.size))
        else:
            free(addresses[event.address])
    return addresses
