"""Interfaces for copying tensors into the memory of a device: the seam between a load and CUDA."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from medusa_runtime.region.file_range import FileRange

ALIGNMENT = 512  # bytes; CUDA's own allocations have at least this, and products are fastest with it


class Copy(Protocol):
    """The copy of one tensor, which runs in the background."""

    def done(self) -> bool:
        """Return whether the whole tensor is on the device; never waits. Raises DeviceError if the copy failed.

        Once it has returned True, the source may be changed or freed.
        """


class Link(Protocol):
    """The way into the memory of one device."""

    def allocate(self, name: str, size_bytes: int) -> Tensor:
        """Allocate uint8 [size_bytes] on the device, aligned to ``ALIGNMENT``, not cleared.

        DeviceError if it is full.
        """

    def copy(self, target: Tensor, source: Tensor, *, urgent: bool, stored: FileRange | None = None) -> Copy:
        """Begin to copy ``source`` (host, any strides, any dtype) into ``target`` (device, contiguous, same shape).

        The link holds the source, which must not change until the copy is done. ``urgent`` means that a forward waits
        for it: it goes before copies that have not begun. ``stored`` says where a file has the source's bytes, which
        may be read from there.
        """

    def close(self) -> None:
        """Wait for the copies that run, and free staging memory. No copy may begin after it. May be called twice."""
