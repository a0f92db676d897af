"""Turning the tensors of a checkpoint into the parameters and buffers of a module."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from medusa_runtime.checkpoint.divided import Divide, DividedIndex
from medusa_runtime.checkpoint.index import WeightIndex
from medusa_runtime.kernels.quantized import QuantizedParameter
from medusa_runtime.load.gate import Gate, unit_gates
from medusa_runtime.load.plan import Place, Plan, Rename, places, plan
from medusa_runtime.load.region_tensors import RegionTensors
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

if TYPE_CHECKING:
    from medusa_runtime.load.quantized.scheme import Quantization


class Applier:
    """Applies tensors to a model of ours, whose parameters want no gradient.

    ``dtype`` converts floating point tensors; None keeps the checkpoint's types. ``rename`` maps a tensor's name in the
    checkpoint to the module's, or to None to leave it out. Without it the module's own ``rename`` is used if it has
    one, else the names are equal. ``quantization`` says how the checkpoint stores quantized weights, if it has any, and
    ``divide`` which tensors the module takes in parts (``RegionTensors``).
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        rename: Rename | None = None,
        quantization: Quantization | None = None,
        divide: Divide | None = None,
    ) -> None:
        self.module = module
        self.dtype = dtype
        self.quantization = quantization
        self._rename: Rename = rename or getattr(module, "rename", None) or (lambda name: name)
        self.others: Collection[str] = ()  # the checkpoint's tensors that are of another module
        self.moves_unaligned = False  # whether tensors move to addresses at which products are exact (``alignment.py``)
        self._divide = divide
        self._places: dict[str, Place] = {}

    def tensors(self, region: Region) -> RegionTensors:
        """Return the tensors of a region in the form in which this applier takes them."""
        if self.quantization is None:
            return RegionTensors(region, self._divide)
        from medusa_runtime.load.quantized.tensors import DequantizedTensors  # most checkpoints do without it

        return DequantizedTensors(region, self.quantization, self.unquantized_dtype, self._divide)

    def index(self, index: WeightIndex) -> WeightIndex:
        """Return a checkpoint's index as ``tensors`` has it for a region. Raises MismatchError like these."""
        whole = index if self._divide is None else DividedIndex(index, self._divide)
        if self.quantization is None:
            return whole
        from medusa_runtime.load.quantized.tensors import DequantizedIndex

        return DequantizedIndex(whole, self.quantization, self.unquantized_dtype)

    @property
    def unquantized_dtype(self) -> torch.dtype:
        """The dtype to which quantized weights are converted."""
        return self.dtype or torch.float32

    def gates(self, timeline: Timeline | None) -> list[Gate]:
        """Return closed gates in front of the module's parts."""
        return unit_gates(self.module, timeline)

    def plan(self, index: WeightIndex) -> Plan:
        """Return where each tensor goes. Raises MismatchError when the checkpoint does not belong to this module."""
        self._places = places(self.module)
        return plan(index, self._places, lambda name: self.needed(name, self._places))

    def unneeded(self, index: WeightIndex, todo: Mapping[str, Place]) -> Collection[str]:
        """Return the tensors beside the plan's that nobody will ask the region for."""
        return index.tensors.keys() - todo.keys()

    def room_for(self, index: WeightIndex, todo: Mapping[str, Place]) -> Mapping[str, Place]:
        """Return the places, by the tensors' names, that a device has memory for: those of the plan, ``todo``."""
        return todo

    def needed(self, name: str, whole: Mapping[str, Place]) -> str | None:
        """Return the name that a checkpoint's tensor has in the module, or None to leave the tensor out.

        ``whole`` has all places of the module.
        """
        if name in self.others:
            return None
        target = self._rename(name)
        # Tools for GPTQ write biases of zeros for layers that have no bias.
        idle = self.quantization is not None and self.quantization.idle_biases and name.endswith(".bias")
        return None if idle and target not in whole else target

    def hints(self, index: WeightIndex) -> bool:
        """Return whether the prefetcher needs hints of the plan's order, because the order of its fetch is another."""
        return False

    def initial_values(self, missing: Sequence[Place]) -> Iterator[Tensor]:
        """Yield values for the places that the checkpoint has no tensor for.

        These are counters of batch norms, which the module has already.
        """
        for place in missing:
            assert not place.tensor.is_meta
            yield place.tensor.detach()

    def staying(self, names: Iterable[str]) -> set[str]:
        """Return those of the checkpoint's ``names`` that may stay quantized, because their modules take codes."""
        whole = places(self.module)
        found = {name: whole.get(self._rename(name) or "") for name in names}
        return {name for name, place in found.items() if place is None or self.takes_codes(place)}

    def takes_codes(self, place: Place) -> bool:
        """Return whether the modules that own a place can compute with a weight that stays quantized."""
        return all(attribute == "weight" and hasattr(owner, "takes_codes") for owner, attribute in place.owners)

    def apply(self, place: Place, tensor: Tensor) -> bool:
        """Give ``tensor``, a view of the region, to the module. Return whether the module now holds a copy and not the
        view.
        """
        if isinstance(tensor, QuantizedParameter):
            self.assign(place, tensor)
            return False
        value = tensor.to(None, self.wanted(place, tensor.dtype))
        if place.is_buffer and same_memory(value, tensor):
            value = value.clone()  # the forward may write to it, so it is never a view
        return not same_memory(self.assign(place, self.as_parameter(place, value)), tensor)

    def wanted(self, place: Place, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that a tensor of ``dtype`` gets: for floats this applier's, or float32 if it stays so."""
        if not dtype.is_floating_point or self.dtype is None:
            return dtype
        stays = all(attribute in getattr(owner, "stays_float32", ()) for owner, attribute in place.owners)
        return dtype if stays and dtype.itemsize > self.dtype.itemsize else self.dtype

    def copied_bytes(self, place: Place, dtype: torch.dtype, shape: Sequence[int], address: int) -> int:
        """Return how many bytes ``apply`` copies of a tensor of this dtype and shape; 0 where the module gets a view.

        ``address`` is where the tensor lies, or a number with the same low bits.
        """
        wanted = self.wanted(place, dtype)
        is_view = wanted == dtype and not place.is_buffer and address % dtype.itemsize == 0
        return 0 if is_view else math.prod(shape) * wanted.itemsize

    def as_parameter(self, place: Place, value: Tensor) -> Tensor:
        """Return ``value`` in the form in which the module holds it: as a parameter, unless this place is a buffer."""
        return value if place.is_buffer else nn.Parameter(value, requires_grad=False)

    def assign(self, place: Place, value: Tensor) -> Tensor:
        """Put ``value`` into every module that owns this place, and return what the modules now hold."""
        for owner, attribute in place.owners:
            held: dict[str, Any] = owner._buffers if place.is_buffer else owner._parameters
            if held.get(attribute) is place.tensor:  # else the user's code has put something else there
                held[attribute] = value
        return value

    def names(self, index: WeightIndex) -> dict[int, str]:
        """Return the checkpoint's name of each tensor of the module, by the tensor's id.

        Only valid when all are applied.
        """
        found: dict[int, str] = {}
        for name in index.order:
            target = self._rename(name)
            place = None if target is None else self._places.get(target)
            if place is None:
                continue
            for owner, attribute in place.owners:
                held: dict[str, Any] = owner._buffers if place.is_buffer else owner._parameters
                found.setdefault(id(held.get(attribute)), name)
        return found


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are views of the same memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
