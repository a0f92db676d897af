"""Applying tensors to a module of which only the factory is known, with the same result as ``load_state_dict``."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from medusa_runtime.checkpoint.gguf.blocks import GGUF_SUFFIX
from medusa_runtime.checkpoint.index import WeightIndex
from medusa_runtime.errors import MismatchError
from medusa_runtime.kernels.quantized import QuantizedParameter
from medusa_runtime.load.aliasing import aliased
from medusa_runtime.load.alignment import must_move, must_move_from
from medusa_runtime.load.applier import Applier, same_memory
from medusa_runtime.load.factory.load_hooks import with_load_hooks
from medusa_runtime.load.factory.options import BuildOptions
from medusa_runtime.load.gate import Gate, owner_gates
from medusa_runtime.load.pending import can_be_pending, fill_in_place, make_pending, pending_value, resolve
from medusa_runtime.load.plan import Place, Plan, Rename, factory_hint, is_batch_counter, places, plan
from medusa_runtime.timeline import Timeline


class FactoryApplier(Applier):
    """Applies tensors to a module that a user's factory made, while the user's code may already use and change it.

    Every module that owns tensors has a gate, and every parameter is a ``PendingParameter`` until its value arrives.
    With ``strict=False``, ``factory`` is called again to make initial values for what the checkpoint lacks.
    """

    def __init__(self, module: nn.Module, factory: Callable[[], nn.Module], options: BuildOptions) -> None:
        super().__init__(module, dtype=options.dtype, rename=_rename(module, options))
        self._factory = factory
        self._options = options
        self.moves_unaligned = options.exact
        self._device = None if options.device is None else torch.device(options.device)
        # The tensors that the factory made. Anything that the user's code puts in the module later is left as it is.
        self._places = places(module)
        self._in_place: set[Place] = set()  # places whose own memory is filled, because other code refers to it
        self.has_shared = False  # whether something else uses the memory of a parameter

    def gates(self, timeline: Timeline | None) -> list[Gate]:
        """Return gates in front of the modules that own tensors; the tensors are pending from now on."""
        found = owner_gates(self.module, timeline)
        self._make_pending({id(owner): gate for gate in found for owner in gate.owners})
        return found

    def _make_pending(self, guards: dict[int, Gate]) -> None:
        device = self._device or torch.device("cpu")
        elsewhere = aliased(place.tensor for place in self._places.values() if can_be_pending(place.tensor))
        self.has_shared = bool(elsewhere)
        for place in set(self._places.values()):
            tensor = place.tensor
            if is_lazy(tensor):
                continue
            if place.is_buffer or id(tensor) in elsewhere or not can_be_pending(tensor):
                self._in_place.add(place)
            if can_be_pending(tensor) and id(tensor) not in elsewhere:
                dtype = self.dtype if self.dtype and tensor.is_floating_point() else tensor.dtype
                make_pending(tensor, guards[id(place.owners[0][0])], dtype, device)

    def plan(self, index: WeightIndex) -> Plan:
        if self.quantization is None and any(shard.name.endswith(GGUF_SUFFIX) for shard in index.shards):
            raise MismatchError(
                f"{index.shards[0].name}: a GGUF file stores tensors in another order than modules have them; expected "
                "safetensors, context.weights.pretrained_model(), or --engine torch"
            )
        rename = with_load_hooks(self.module, index, self._rename)
        strict = self._options.strict
        found = plan(index, self._places, rename, strict=strict, last_wins=True, hint=self.hint, may_lack=self.may_lack)
        if index.recorded:
            return found
        # The execution order is not known. It is nearly always the order in which the module was constructed.
        rank = {name: number for number, name in enumerate(self._places)}
        return Plan(dict(sorted(found.todo.items(), key=lambda item: rank[item[1].name])), found.missing)

    def hint(self, absent: list[str], index: WeightIndex) -> str:
        """Return what to do about tensors that the checkpoint lacks, for an error."""
        return factory_hint(absent, index)

    def may_lack(self, name: str) -> bool:
        """Return whether the checkpoint may lack a tensor of the module, which then keeps its initial value."""
        return is_batch_counter(name)

    def unneeded(self, index: WeightIndex, todo: Mapping[str, Place]) -> Collection[str]:
        return ()  # the user may build other modules of the same checkpoint

    def hints(self, index: WeightIndex) -> bool:
        return not index.recorded

    def initial_values(self, missing: Sequence[Place]) -> Iterator[Tensor]:
        """Yield the values that the factory gives these places, as after ``load_state_dict(strict=False)``."""
        fresh: dict[str, Place] = {}
        for place in missing:
            with torch._C.DisableTorchFunctionSubclass():
                value = None if place.tensor.is_meta or is_lazy(place.tensor) else place.tensor.detach()
            if value is None:
                fresh = fresh or places(self._factory())
                tensor = fresh[place.name].tensor
                value = tensor if is_lazy(tensor) else tensor.detach()
            yield value

    def takes_codes(self, place: Place) -> bool:
        return place not in self._in_place and super().takes_codes(place)

    def apply(self, place: Place, tensor: Tensor) -> bool:
        if isinstance(tensor, QuantizedParameter):
            return super().apply(place, tensor)
        value = self._converted(place, tensor)
        filled = place in self._in_place and fill_in_place(place.tensor, value)
        if place.is_buffer and not filled and same_memory(value, tensor):
            value = value.clone()  # the forward may write to it, so it is never a view
        value = self.assign(place, place.tensor if filled else self.as_parameter(place, value))
        return filled or is_lazy(value) or not same_memory(value, tensor)

    def copied_bytes(self, place: Place, dtype: torch.dtype, shape: Sequence[int], address: int) -> int:
        if self._device is not None and self._device.type != "cpu":
            return 0
        own, options = place.tensor.dtype, self._options
        wanted = self.dtype or own if own.is_floating_point and dtype.is_floating_point else own
        is_copied = (
            place.is_buffer
            or place in self._in_place
            or wanted != dtype
            or options.copy
            or (options.memory_format is not None and len(shape) == 4)
            or (options.exact and must_move_from(address, dtype, shape))
            or address % dtype.itemsize
        )
        return math.prod(shape) * wanted.itemsize if is_copied else 0

    def as_parameter(self, place: Place, value: Tensor) -> Tensor:
        if place.is_buffer or is_lazy(value):
            return value
        # ``requires_grad`` changes how torch multiplies, and so the last bits, even where no gradient is computed.
        return nn.Parameter(value, place.tensor.requires_grad)

    def assign(self, place: Place, value: Tensor) -> Tensor:
        if pending_value(place.tensor) is not None:
            value = resolve(place.tensor, value)
        return super().assign(place, value)

    def _converted(self, place: Place, tensor: Tensor) -> Tensor:
        """Convert ``tensor`` as ``load_state_dict`` does: to the module's type, whatever the file's is."""
        if is_lazy(tensor):
            return tensor
        dtype, own = self.dtype if tensor.is_floating_point() else None, place.tensor.dtype
        value = tensor.to(self._device, (dtype or own) if own.is_floating_point else own)
        if self._options.memory_format is not None and value.dim() == 4:
            value = value.contiguous(memory_format=self._options.memory_format)
        elif not (place.is_buffer or is_lazy(place.tensor)):
            value = _laid_out_as(place.tensor, value)
        must_copy = self._options.copy or (self._options.exact and must_move(value))
        return value.clone() if must_copy and same_memory(value, tensor) else value


def _rename(module: nn.Module, options: BuildOptions) -> Rename:
    own: Rename | None = options.rename or getattr(module, "rename", None)

    def rename(name: str) -> str | None:
        if not name.startswith(options.prefix):
            return None
        bare = name[len(options.prefix) :]
        return own(bare) if own else bare

    return rename


def _laid_out_as(like: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` in the memory format of ``like``, which decides the last bits.

    ``load_state_dict`` does the same.
    """
    if like.stride() == value.stride():
        return value
    pairs = zip(like.shape, like.stride(), value.stride(), strict=True)
    # Strides of dimensions of size 1 move nothing, but torch reads a 1x1 kernel's memory format from them.
    if all(size == 1 or own == found for size, own, found in pairs):
        return value.as_strided(like.shape, like.stride(), value.storage_offset())
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty_like(like, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)
