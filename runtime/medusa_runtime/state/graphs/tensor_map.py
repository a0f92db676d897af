"""Addresses in tensor maps (CUtensorMap), which TMA kernels take by value: 128 bytes in an unpublished format.

The driver can write another address into a map (cuTensorMapReplaceAddress), but cannot read the present one. So it is
asked, once for each bit of an address, to write two that differ in this bit alone, which shows the bits of a map that
depend on it. From these, the address in any map can be worked out. Bytes count as a map only if two captures prove it:
they differ in nothing else, and the driver must be able to make the second capture's bytes from the first's. (A graph
of a real model has thousands of words that need this question, and a call of the driver for each bit of each took
minutes.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from ...errors import DeviceError
from .driver import CudaDriver

MAP_BYTES = 128
_ALIGNMENT = 128  # of CUtensorMap, since CUDA 13
_BITS = range(4, 48)  # the bits of an address: maps are aligned to 16 bytes, and device memory is below 2^47
_PROBE, _OTHER = 1 << 40, 1 << 41

Replace = Callable[[bytes, int], bytes | None]
"""Returns a map with another address, given the map and that address; None if the driver refuses."""


def replacer(driver: CudaDriver) -> Replace:
    room = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
    at = -(-ctypes.addressof(room) // _ALIGNMENT) * _ALIGNMENT

    def replace(data: bytes, address: int) -> bytes | None:
        assert room is not None  # the closure keeps it alive
        ctypes.memmove(at, data, MAP_BYTES)
        try:
            refused = driver.result("cuTensorMapReplaceAddress", at, address)
        except DeviceError:  # a driver that is older than tensor maps
            return None
        return None if refused else ctypes.string_at(at, MAP_BYTES)

    return replace


class TensorMaps:
    """Reads the addresses in tensor maps, with what the driver's answers have taught it about their format."""

    def __init__(self, replace: Replace) -> None:
        self._replace = replace
        self._masks: dict[int, int] = {}  # by bit of the address: the bits of a map that depend on it
        self._address_bits = 0  # all of these bits

    def addresses(self, one: bytes, two: bytes) -> tuple[int, int] | None:
        """Return the addresses in two maps that differ only in them; None if the bytes are not two such maps."""
        self._learn(one)
        if not self._masks or (_number(one) ^ _number(two)) & ~self._address_bits:
            return None
        first, second = self._address(one), self._address(two)
        if first is None or second is None or self._replace(one, second) != two:
            return None
        return first, second

    def _learn(self, data: bytes) -> None:
        """Learn the bits that are not known yet. A map that needs a larger alignment than others leaves some out."""
        unknown = [bit for bit in _BITS if bit not in self._masks]
        if not unknown or self._replace(data, _PROBE) is None:
            return
        for bit in unknown:
            before, after = (_PROBE, _PROBE ^ 1 << bit) if 1 << bit != _PROBE else (_PROBE | _OTHER, _OTHER)
            pair = self._replace(data, before), self._replace(data, after)
            if pair[0] is not None and pair[1] is not None:
                self._masks[bit] = _number(pair[0]) ^ _number(pair[1])
                self._address_bits |= self._masks[bit]

    def _address(self, data: bytes) -> int | None:
        base = self._replace(data, _PROBE)
        if base is None:
            return None
        found, changed = _PROBE, _number(data) ^ _number(base)
        for bit, mask in self._masks.items():
            if mask and changed & mask == mask:
                found ^= 1 << bit
                changed ^= mask
        return found if self._replace(data, found) == data else None


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


__all__ = ["MAP_BYTES", "Replace", "TensorMaps", "replacer"]
