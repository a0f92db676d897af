"""Applying one part of a checkpoint to one part of a model: the layers that a worker of a group holds, or the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from medusa_runtime.checkpoint.divided import Divide
from medusa_runtime.checkpoint.index import WeightIndex
from medusa_runtime.load.applier import Applier
from medusa_runtime.load.gate import Gate, unit_gates
from medusa_runtime.load.plan import Place, Plan, places, plan
from medusa_runtime.timeline import Timeline

if TYPE_CHECKING:
    from medusa_runtime.load.quantized.scheme import Quantization


class PartApplier(Applier):
    """Applies the tensors for which ``needed`` returns True, by their qualified names in the module.

    With ``rest`` it applies all the others instead. Units of the other part get no gate, and their parameters keep no
    memory. A tied parameter belongs to the needed part if any of its names does.

    ``room_for_all``: on a device, allocate memory for all tensors of the module at once.
    """

    def __init__(
        self,
        module: nn.Module,
        needed: Callable[[str], bool],
        *,
        dtype: torch.dtype | None,
        quantization: Quantization | None = None,
        divide: Divide | None = None,
        rest: bool = False,
        room_for_all: bool = False,
    ) -> None:
        super().__init__(module, dtype=dtype, quantization=quantization, divide=divide)
        self._needed = needed
        self._is_rest = rest
        self._room_for_all = room_for_all

    def gates(self, timeline: Timeline | None) -> list[Gate]:
        return unit_gates(self.module, timeline, lambda name: self._needed(name) is not self._is_rest)

    def plan(self, index: WeightIndex) -> Plan:
        whole = places(self.module)
        needed = {place.name for name, place in whole.items() if self._needed(name)}
        self._places = {name: place for name, place in whole.items() if (place.name in needed) is not self._is_rest}
        return plan(index, self._places, lambda name: self._here(name, whole))

    def unneeded(self, index: WeightIndex, todo: Mapping[str, Place]) -> Collection[str]:
        return ()  # another load takes the other part

    def room_for(self, index: WeightIndex, todo: Mapping[str, Place]) -> Mapping[str, Place]:
        if not self._room_for_all:
            return todo
        whole = places(self.module)
        return plan(index, whole, lambda name: self.needed(name, whole)).todo

    def hints(self, index: WeightIndex) -> bool:
        """Return True for the needed part, which a prefetcher with several readers would not fetch first otherwise."""
        return not self._is_rest

    def _here(self, name: str, whole: dict[str, Place]) -> str | None:
        target = self.needed(name, whole)
        return None if target in whole and target not in self._places else target


__all__ = ["PartApplier"]
