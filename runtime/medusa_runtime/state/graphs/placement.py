"""Map device memory by name: at its captured addresses, or elsewhere if those are taken."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from ctypes import byref, c_size_t, c_uint64
from typing import NamedTuple

from .blueprint import MemoryRange
from .driver import OUT_OF_MEMORY, CudaDriver, CudaError
from .mismatch import GraphMismatch, Reason
from .structs import MemAccessDesc, MemAllocationProp, MemLocation

logger = logging.getLogger(__name__)

_DEVICE, _PINNED, _READ_WRITE = 1, 1, 3
# Addresses only, which take no memory. A driver puts a small reservation into a gap of its own, whatever address is
# wished for, or rounds its address up to 32 MiB (seen with driver 580). One of this size fits into no gap.
RESERVED_BYTES = 512 << 30


class Reservation(NamedTuple):
    """Addresses that the driver gives to nobody else, until it is freed."""

    start: int
    size: int


class _Span(NamedTuple):
    """One reservation of addresses, which ranges on the same page share."""

    start: int
    size: int
    ranges: list[MemoryRange]


class Placement:
    """Where memory ranges are now: ``addresses``, by name. A context manager that unmaps at its end what it mapped."""

    def __init__(self, driver: CudaDriver, addresses: dict[str, int]) -> None:
        self.addresses = addresses
        self._driver = driver
        self._mapped: list[tuple[int, int, int]] = []  # address, size, handle
        self._reserved: list[Reservation] = []

    def __enter__(self) -> Placement:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, memory_range: MemoryRange, offset: int) -> int:
        """Return where this byte of a range is now. Raises GraphMismatch if the range was not placed."""
        if memory_range.name not in self.addresses:
            raise GraphMismatch(Reason.MEMORY_RANGE, f"{memory_range.name} was not placed")
        return self.addresses[memory_range.name] + offset

    def reserve(self, size: int, granule: int, wanted: int) -> int:
        """Reserve addresses until the end, unless they are free in an earlier reservation, and return the first."""
        end = wanted + size
        is_ours = any(one.start <= wanted and end <= one.start + one.size for one in self._reserved)
        if is_ours and not any(start < end and wanted < start + length for start, length, _ in self._mapped):
            return wanted
        self._reserved.append(reserve(self._driver, size, granule, wanted))
        return self._reserved[-1].start

    def map(self, span: _Span, address: int) -> None:
        """Map new memory at a reserved address."""
        device = MemLocation(_DEVICE, self._driver.current_device())
        handle = self._driver.handle("cuMemCreate", span.size, byref(MemAllocationProp(_PINNED, location=device)), 0)
        try:
            self._driver.call("cuMemMap", address, span.size, 0, handle, 0)
        except CudaError:
            self._driver.result("cuMemRelease", handle)
            raise
        self._mapped.append((address, span.size, handle))
        self._driver.call("cuMemSetAccess", address, span.size, byref(MemAccessDesc(device, _READ_WRITE)), 1)
        for memory_range in span.ranges:
            self.addresses[memory_range.name] = address + memory_range.address - span.start

    def close(self) -> None:
        while self._mapped:
            address, size, handle = self._mapped.pop()
            self._driver.result("cuMemUnmap", address, size)
            self._driver.result("cuMemRelease", handle)
        while self._reserved:
            self._driver.result("cuMemAddressFree", *self._reserved.pop())


def place(
    driver: CudaDriver,
    ranges: Iterable[MemoryRange],
    *,
    at_recorded: bool = True,
    placed: dict[str, int] | None = None,
    reserved: bool = False,
) -> Placement:
    """Map every range that is not in ``placed`` (addresses by name), each at its captured address if that is free.

    If an address is taken, the range is mapped elsewhere, and pointers into it are relocated. With ``reserved``, the
    caller has reserved the addresses of all ranges. Raises GraphMismatch if the device has too little free memory; then
    nothing stays mapped.
    """
    placement = Placement(driver, dict(placed or {}))
    granule = granularity(driver)
    spans = _spans([memory_range for memory_range in ranges if memory_range.name not in placement.addresses], granule)
    needed, free, total = sum(span.size for span in spans), c_size_t(), c_size_t()
    driver.call("cuMemGetInfo_v2", byref(free), byref(total))
    if needed > free.value:
        raise GraphMismatch(Reason.MEMORY, f"expected {needed >> 20} MiB of free memory, found {free.value >> 20} MiB")
    try:
        for span in spans:
            address = span.start
            if not reserved:
                address = placement.reserve(span.size, granule, span.start if at_recorded else 0)
            if address != span.start and at_recorded:
                names = ", ".join(memory_range.name for memory_range in span.ranges)
                logger.info("%#x is taken: %s is at %#x instead", span.start, names, address)
            placement.map(span, address)
    except CudaError as error:
        placement.close()
        reason = Reason.MEMORY if error.result == OUT_OF_MEMORY else Reason.DRIVER_CALL
        raise GraphMismatch(reason, str(error)) from error
    return placement


def granularity(driver: CudaDriver) -> int:
    """Return the number of bytes of which sizes and addresses of mapped memory must be multiples."""
    prop = MemAllocationProp(type=_PINNED, location=MemLocation(_DEVICE, driver.current_device()))
    granule = c_size_t()
    driver.call("cuMemGetAllocationGranularity", byref(granule), byref(prop), 0)
    return granule.value


def reserve(driver: CudaDriver, size: int, granule: int, wanted: int) -> Reservation:
    """Reserve addresses from ``wanted`` on, at least ``size``; if these are taken, or for 0, where the driver likes."""
    address = c_uint64()
    large = max(size, RESERVED_BYTES)
    if wanted and not driver.result("cuMemAddressReserve", byref(address), large, granule, wanted, 0):
        if address.value == wanted:
            return Reservation(wanted, large)
        driver.call("cuMemAddressFree", address.value, large)
    driver.call("cuMemAddressReserve", byref(address), size, granule, 0, 0)
    return Reservation(address.value, size)


def _spans(ranges: Sequence[MemoryRange], granule: int) -> list[_Span]:
    """Round ranges to whole granules, with one span for ranges that share a granule."""
    spans: list[_Span] = []
    for memory_range in sorted(ranges, key=lambda memory_range: memory_range.address):
        start = memory_range.address // granule * granule
        stop = -(-(memory_range.address + max(memory_range.size, 1)) // granule) * granule
        if spans and start < spans[-1].start + spans[-1].size:
            last = spans.pop()
            spans.append(
                _Span(last.start, max(stop, last.start + last.size) - last.start, [*last.ranges, memory_range])
            )
        else:
            spans.append(_Span(start, stop - start, [memory_range]))
    return spans
