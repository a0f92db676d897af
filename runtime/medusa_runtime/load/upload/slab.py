"""The layout of the weights on a device: all in one block of memory, in execution order.

The layout is computed from the weight index alone, before any byte has arrived. So addresses are known, and CUDA graphs
can be captured or restored, while the weights are still being fetched. Tensors that a model multiplies in one product
(q, k and v; gate and up) lie side by side, which fuses them without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from medusa_runtime.load.plan import Place
from medusa_runtime.load.upload.link import ALIGNMENT

_PRODUCT_ALIGNMENT = 16  # bytes; what a product needs of each matrix inside a fused one


class Slot(NamedTuple):
    """The part of the slab that holds one tensor."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Layout(NamedTuple):
    """All slots of a slab, by the tensors' names in the checkpoint."""

    slots: dict[str, Slot]
    size_bytes: int


def lay_out(todo: Mapping[str, Place], module: nn.Module, dtype: torch.dtype | None) -> Layout:
    """Return slots for all tensors in execution order. The members of a module's ``FUSED`` groups follow each other.

    ``FUSED`` is an attribute of a module: groups of names of projections whose weights (and biases) are multiplied in
    one product. ``dtype`` is that of floating point tensors; None keeps each parameter's.
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


class Slab(NamedTuple):
    """A block of device memory, uint8, and its layout."""

    memory: Tensor
    layout: Layout

    def views(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the tensors of these names, as views of the memory."""
        return {
            name: self.memory[slot.offset : slot.offset + slot.size_bytes].view(slot.dtype).view(slot.shape)
            for name, slot in ((name, self.layout.slots[name]) for name in names)
        }


def _groups(module: nn.Module) -> dict[int, tuple[int, ...]]:
    """Return the ids of all tensors in each tensor's ``FUSED`` group, by the id of the tensor."""
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
