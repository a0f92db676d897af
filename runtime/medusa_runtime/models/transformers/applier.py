"""An applier for modules of transformers. It renames and fuses a checkpoint's tensors as ``from_pretrained`` does."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...checkpoint.index import TensorEntry, WeightIndex
from ...checkpoint.text_names import text_name
from ...errors import MismatchError
from ...load.factory.applier import FactoryApplier
from ...load.factory.options import BuildOptions
from ...load.plan import Place, Plan, model_hint, plan
from .experts import SeparateExperts

if TYPE_CHECKING:
    from ...load.quantized.scheme import Quantization


_DEFAULTS = BuildOptions()


@dataclass(eq=False)
class _Fused:
    """Tensors of a checkpoint that together become one or more tensors of the module, such as a layer's experts.

    ``sources`` has, for the name of each such tensor in the checkpoint, the converter's pattern and the tensor's number
    in the group. ``arrived`` has the tensors that have been loaded so far.
    """

    converter: Any
    target: str
    sources: dict[str, tuple[str, int]] = field(default_factory=dict)
    arrived: dict[str, Tensor] = field(default_factory=dict)


class TransformersApplier(FactoryApplier):
    """The applier for a module of transformers, which ``factory`` builds again if needed.

    A tensor that the module has no place for is left out, as in transformers. A missing one is an error.
    """

    def __init__(
        self,
        module: nn.Module,
        factory: Callable[[], nn.Module],
        dtype: torch.dtype,
        quantization: Quantization | None = None,
        options: BuildOptions = _DEFAULTS,
        *,
        text_part: bool = False,
    ) -> None:
        """With ``text_part``, the checkpoint may be that of a model around this decoder (``text_name``)."""
        keep_in_float32(module)
        exact = options.exact and dtype.itemsize > 2
        super().__init__(module, factory, dataclasses.replace(options, rename=self.target, exact=exact))
        self.quantization, self._float = quantization, dtype
        self._optional = [
            re.compile(pattern) for pattern in getattr(module, "_keys_to_ignore_on_load_missing", None) or ()
        ]
        self._names = _Names(module, text_part=text_part)
        self._experts = {name: part for name, part in module.named_modules() if isinstance(part, SeparateExperts)}
        self._divide = self._divided if self._experts else None
        self._fused: dict[Place, tuple[_Fused, str]] = {}

    @property
    def unquantized_dtype(self) -> torch.dtype:
        return self._float

    def _divided(self, name: str, entry: TensorEntry) -> Mapping[str, TensorEntry] | None:
        """Return the parts of a tensor that has the weights of all experts of a layer."""
        path = self._names.of(name)[0] if len(entry.shape) == 3 else ""
        module, _, kind = path.rpartition(".")
        found = self._experts.get(module) if kind in ("gate_up_proj", "down_proj") else None
        return None if found is None else found.divided(name, path, entry)

    def target(self, name: str) -> str | None:
        """Return the module's tensor that a checkpoint's tensor becomes or is fused into; None if there is none."""
        target, _, _ = self._names.of(name)
        return target if target in self._places else None

    def hint(self, absent: list[str], index: WeightIndex) -> str:
        return model_hint(absent, index)

    def may_lack(self, name: str) -> bool:
        return super().may_lack(name) or any(pattern.search(name) for pattern in self._optional)

    def initial_values(self, missing: Sequence[Place]) -> Iterator[Tensor]:
        for place in missing:
            value = self._initial_value(place)
            yield from super().initial_values([place]) if value is None else [value]

    def _initial_value(self, place: Place) -> Tensor | None:
        """Return what transformers initializes a parameter with, such as positions that a formula computes.

        Return None if it has a value already.
        """
        module: Any = self.module
        owner, name = place.owners[0]
        with torch._C.DisableTorchFunctionSubclass():  # else parameters without a value would be waited for
            if place.is_buffer or not place.tensor.is_meta:
                return None
            value = nn.Parameter(torch.empty(place.tensor.shape, dtype=place.tensor.dtype), requires_grad=False)
            held, owner._parameters[name] = owner._parameters[name], value
            try:
                module._init_weights(owner)
            finally:
                owner._parameters[name] = held
        return value.data

    def plan(self, index: WeightIndex) -> Plan:
        groups: dict[str, _Fused] = {}
        for name in sorted(index.tensors, key=_natural):
            target, pattern, converter = self._names.of(name)
            if converter is not None and pattern is not None and target in self._places:
                group = groups.setdefault(target, _Fused(converter, target))
                group.sources[name] = (pattern, len(group.sources))
        if not groups:
            return super().plan(index)
        return self._fused_plan(index, groups)

    def _fused_plan(self, index: WeightIndex, groups: dict[str, _Fused]) -> Plan:
        """Return the plan for a checkpoint with fused tensors.

        Each source of a fused tensor gets a place of its own, with the same owners as the fused tensor.
        """
        fused: dict[str, Place] = {}
        made: set[str] = set()
        for group in groups.values():
            results = self._results(group)
            owners = tuple(owner for name in results for owner in self._places[name].owners)
            made.update(results)
            for name in group.sources:
                place = Place(f"{group.target} of {name}", owners, self._places[group.target].tensor, False)
                fused[name] = place
                self._fused[place] = (group, name)
            group.arrived = {name: torch.empty(index.tensors[name].shape, device="meta") for name in group.sources}
            self._converted_group(group)  # of shapes alone, so that what does not fit is an error now
        rest = {name: place for name, place in self._places.items() if place.name not in made}

        def rename(name: str) -> str | None:
            target = None if name in fused else self.target(name)
            return target if target in rest else None

        strict = self._options.strict
        found = plan(index, rest, rename, strict=strict, last_wins=True, hint=self.hint, may_lack=self.may_lack)
        todo = {**found.todo, **fused}
        rank = {name: number for number, name in enumerate(self._places)}

        def at(item: tuple[str, Place]) -> int:
            group = self._fused.get(item[1])
            return rank[item[1].name if group is None else group[0].target]

        order = sorted(todo.items(), key=at) if not index.recorded else [(n, todo[n]) for n in index.order if n in todo]
        return Plan(dict(order), found.missing)

    def _results(self, group: _Fused) -> list[str]:
        """Return the names of the module's tensors that a group becomes."""
        targets = group.converter.target_patterns
        first = next((pattern for pattern in targets if pattern in group.target), None)
        names = [group.target] if first is None else [group.target.replace(first, pattern, 1) for pattern in targets]
        absent = [name for name in names if name not in self._places]
        if absent:
            raise MismatchError(f"the checkpoint has weights for {', '.join(absent)}, which the model does not have")
        return names

    def staying(self, names: Iterable[str]) -> set[str]:
        return super().staying(name for name in names if self._names.of(name)[2] is None)  # others are fused as floats

    def takes_codes(self, place: Place) -> bool:
        return place not in self._fused and super().takes_codes(place)

    def copied_bytes(self, place: Place, dtype: torch.dtype, shape: Sequence[int], address: int) -> int:
        if place not in self._fused:
            return super().copied_bytes(place, dtype, shape, address)
        return math.prod(shape) * place.tensor.dtype.itemsize

    def apply(self, place: Place, tensor: Tensor) -> bool:
        if place not in self._fused:
            return super().apply(place, tensor)
        group, name = self._fused[place]
        group.arrived[name] = tensor
        if len(group.arrived) < len(group.sources):
            return False
        for target, value in self._converted_group(group).items():
            super().apply(self._places[target], value)
        return False

    def _converted_group(self, group: _Fused) -> dict[str, Tensor]:
        """Return what the tensors that have arrived become. Raises MismatchError if they do not fit the module."""
        converter = copy.deepcopy(group.converter)
        for name, (pattern, _) in sorted(group.sources.items(), key=lambda item: item[1][1]):
            converter.add_tensor(group.target, name, pattern, group.arrived[name])
        group.arrived.clear()
        converted = converter.convert(group.target, model=self.module, config=self.module.config)
        found = {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
        for name, value in found.items():
            expected = self._places[name].tensor.shape
            if value.shape != expected:
                raise MismatchError(f"{name}: expected {list(expected)}, found {list(value.shape)} in the checkpoint")
        return found


class _Names:
    """A table of where a checkpoint's tensors go in a module of transformers."""

    def __init__(self, module: Any, *, text_part: bool) -> None:
        from transformers import core_model_loading
        from transformers.conversion_mapping import get_model_conversion_mapping

        self._text_part = text_part
        self._loading = core_model_loading
        self._prefix = module.base_model_prefix
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        self._own = {name: True for name, _ in named}
        mapping = get_model_conversion_mapping(module)
        self._converters = [one for one in mapping if isinstance(one, core_model_loading.WeightConverter)]
        self._renamings = [one for one in mapping if not isinstance(one, core_model_loading.WeightConverter)]
        self._by_pattern = {pattern: one for one in self._converters for pattern in one.source_patterns}
        self._found: dict[str, tuple[str, str | None, Any]] = {}

    def of(self, name: str) -> tuple[str, str | None, Any]:
        """Return a tensor's name in the module, and the pattern and the converter that it needs, or None for both."""
        if name not in self._found:
            rename = self._loading.rename_source_key
            key = text_name(name) if self._text_part else name
            if key is None:
                return name, None, None
            target, pattern = rename(key, self._renamings, self._converters, self._prefix, self._own)
            for renamings in (
                self._renamings,
                [],
            ):  # without fusing, as with ``SeparateExperts``, and under its own name
                if target not in self._own:
                    other, _ = rename(key, renamings, [], self._prefix, self._own)
                    target, pattern = (other, None) if other in self._own else (target, pattern)
            self._found[name] = target, pattern, None if pattern is None else self._by_pattern[pattern]
        return self._found[name]


def keep_in_float32(module: Any) -> None:
    """Convert to float32 the parameters that transformers always keeps in float32."""
    parts = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    for name, parameter in list(module.named_parameters()):
        if parts & set(name.split(".")) and parameter.dtype in (torch.bfloat16, torch.float16):
            owner, _, attribute = name.rpartition(".")
            held = module.get_submodule(owner)._parameters
            held[attribute] = nn.Parameter(parameter.to(torch.float32), parameter.requires_grad)


def _natural(name: str) -> list[Any]:
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in name.split(".")]


__all__ = ["TransformersApplier"]
