"""Tensors on their way from the region into a device's memory (ParaServe §5.2: the parameter manager's streams).

Where each tensor goes is decided before its bytes are there, from the index alone: all lie in one slab, in execution
order, and those that a model multiplies in one product (q, k and v; gate and up) lie side by side, which fuses them
without a copy. So addresses are known, and CUDA graphs can be captured or restored, while the weights still come.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from medusa_runtime.load.plan import Place

ALIGNMENT = 512  # bytes; what CUDA's own allocations have at least, and products are fastest with
_PRODUCT_ALIGNMENT = 16  # bytes; what a product needs of a matrix, and so of one inside a fused one
_IN_FLIGHT_BYTES = 256 << 20  # a tensor that a forward waits for waits no longer than these take
_LOOK_S = 0.0002


class Copy(Protocol):
    """One tensor's way to the device, begun."""

    def done(self) -> bool:
        """Whether all of it is there; never waits. Raises DeviceError when it failed."""


class Link(Protocol):
    """The way into one device's memory."""

    def memory(self, name: str, size_bytes: int) -> Tensor:
        """uint8 [size_bytes] on the device, aligned to ``ALIGNMENT``, with whatever was in it. DeviceError if full."""

    def copy(self, target: Tensor, source: Tensor, *, urgent: bool) -> Copy:
        """Begin to copy ``source`` (host, any strides, any dtype) into ``target`` (device, same shape).

        The source must stay as it is until the copy is done. ``urgent``: a forward waits for it.
        """

    def forget(self, source: Tensor) -> None:
        """The host memory of a tensor whose copy is done is about to be released."""

    def close(self) -> None:
        """Wait for what has begun; let go of staging memory. May be called twice."""


class Slot(NamedTuple):
    """Where a place lies in the slab."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Layout(NamedTuple):
    slots: dict[str, Slot]  # by the tensor's name in the checkpoint
    size_bytes: int


def lay_out(todo: Mapping[str, Place], module: nn.Module, dtype: torch.dtype | None) -> Layout:
    """Slots for all tensors in execution order; the members of a module's ``FUSED`` groups follow each other.

    ``FUSED`` of a module: groups of names of its projections, whose weights (and biases) are multiplied at once.
    """
    groups = _groups(module)
    by_tensor = {id(place.tensor): name for name, place in todo.items()}
    slots: dict[str, Slot] = {}
    end = 0
    for name, place in todo.items():
        if name in slots:
            continue
        members = [by_tensor[key] for key in groups.get(id(place.tensor), ()) if key in by_tensor] or [name]
        end = _aligned(end, ALIGNMENT)
        for member in members:
            end = _aligned(end, _PRODUCT_ALIGNMENT)
            slot = slots[member] = Slot(end, _dtype_of(todo[member], dtype), tuple(todo[member].tensor.shape))
            end += slot.size_bytes
    return Layout(slots, _aligned(end, ALIGNMENT))


def _groups(module: nn.Module) -> dict[int, tuple[int, ...]]:
    """For each tensor of a group the tensors of that group, by id."""
    groups: dict[int, tuple[int, ...]] = {}
    for part in module.modules():
        for names in getattr(part, "FUSED", ()):
            projections = [part.get_submodule(name) for name in names]
            for attribute in ("weight", "bias"):
                tensors = [projection._parameters.get(attribute) for projection in projections]
                if all(tensor is not None for tensor in tensors):
                    keys = tuple(id(tensor) for tensor in tensors)
                    groups.update(dict.fromkeys(keys, keys))
    return groups


def _dtype_of(place: Place, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and place.tensor.is_floating_point() else place.tensor.dtype


def _aligned(number: int, alignment: int) -> int:
    return -(-number // alignment) * alignment


@dataclass(slots=True)
class _Running:
    name: str
    copy: Copy
    size_bytes: int


class Uploads:
    """What has begun and is not known to be done. Belongs to one thread."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._running: deque[_Running] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._running)

    @property
    def has_room(self) -> bool:
        return self._bytes < _IN_FLIGHT_BYTES

    def begin(self, name: str, target: Tensor, source: Tensor, *, urgent: bool) -> None:
        running = _Running(name, self._link.copy(target, source, urgent=urgent), target.nbytes)
        self._running.append(running)
        self._bytes += running.size_bytes

    def finished(self) -> list[str]:
        """Those that are done, each told once, in any order: urgent ones overtake others."""
        done = [running for running in self._running if running.copy.done()]
        if done:
            self._running = deque(running for running in self._running if running not in done)
            self._bytes -= sum(running.size_bytes for running in done)
        return [running.name for running in done]

    def pause(self, check: Callable[[], None]) -> list[str]:
        """Wait until something is done; ``check`` is called all the while and may raise."""
        while not (names := self.finished()):
            check()
            time.sleep(_LOOK_S)
        return names


def views(slab: Tensor, layout: Layout, names: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of a slab."""
    return {
        name: slab[slot.offset : slot.offset + slot.size_bytes].view(slot.dtype).view(slot.shape)
        for name, slot in ((name, layout.slots[name]) for name in names)
    }
