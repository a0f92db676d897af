"""Experts of transformers' mixtures as modules of their own, so that each one's weights stay where they lie.

transformers keeps the experts of a layer in a few fused parameters, and copies a checkpoint's tensors into them. Here
such a module is replaced by one with an expert for each part of them. As in ``faster``, what a class computes is not
looked up by its name: its own forward is tried with random numbers.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...checkpoint.divided import rows
from ...checkpoint.index import TensorEntry
from ...errors import MismatchError
from ...load.skeleton import skeleton
from ..layers.linear import Linear
from ..mixture import combined
from ..sizes import MOST_EXPERTS
from .trials import Tried, kind_of

_KINDS = ("gate_up_proj", "down_proj")
_SOURCE = re.compile(r"experts\.\*\.(\w+)\.weight$")  # of a converter, for the tensors that it fuses
_STACKING = {("MergeModulelist", 0), ("Concatenate", 1)}  # what such a converter does, and along which dimension


class _Names(NamedTuple):
    """The names of an expert's projections in the checkpoints of a model."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class SeparateExperts(nn.ModuleList):
    """The experts of a layer, in the place of a module of transformers with fused parameters."""

    def __init__(self, experts: Iterable[nn.Module], names: _Names) -> None:
        super().__init__(experts)
        self.names = names

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return combined(self, hidden_states, top_k_weights, top_k_index)

    def divided(self, name: str, path: str, entry: TensorEntry) -> Mapping[str, TensorEntry]:
        """Return the parts of a tensor with the weights of all experts.

        ``path`` is its name in transformers' module. Raises MismatchError for another shape than the weights have.
        """
        module, _, kind = path.rpartition(".")
        down: Any = self[0].get_submodule(self.names.down)
        hidden, size = down.weight.shape
        expected = (len(self), hidden, size) if kind == "down_proj" else (len(self), 2 * size, hidden)
        if entry.shape != expected or entry.strides is not None:
            raise MismatchError(f"{name}: expected {list(expected)} without gaps, found {list(entry.shape)}")
        if kind == "down_proj":
            return rows(entry, [f"{module}.{expert}.{self.names.down}.weight" for expert in range(len(self))])
        halves = entry._replace(shape=(2 * len(self), size, hidden))
        names = (self.names.gate, self.names.up)
        return rows(halves, [f"{module}.{expert}.{name}.weight" for expert in range(len(self)) for name in names])


class _Expert(nn.Module):
    def __init__(self, names: _Names, hidden: int, size: int, act_fn: Any) -> None:
        super().__init__()
        self.add_module(names.gate, Linear(hidden, size, bias=False))
        self.add_module(names.up, Linear(hidden, size, bias=False))
        self.add_module(names.down, Linear(size, hidden, bias=False))
        self.act_fn = act_fn
        self.names = names

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return cast(Tensor, down(self.act_fn(gate(x)) * up(x)))


def separate_experts(module: nn.Module) -> None:
    """Replace the fused experts in a skeleton of transformers, unless there are absurdly many."""
    tried: Tried = {}
    fused: list[tuple[str, Any]] = [(path, part) for path, part in module.named_modules() if _is_fused(part, tried)]
    if not fused or sum(len(part.down_proj) for _, part in fused) > MOST_EXPERTS:
        return
    names = _names(module)
    if names is None:
        return
    with skeleton():
        for path, part in fused:
            owner, _, attribute = path.rpartition(".")
            setattr(module.get_submodule(owner), attribute, _separate(part, names).train(part.training))


def _separate(part: Any, names: _Names) -> SeparateExperts:
    count, hidden, size = part.down_proj.shape
    kind = _class_of(cast(Any, type(part)), cast(Any, type(part.act_fn)))
    return SeparateExperts((kind(names, hidden, size, part.act_fn) for _ in range(count)), names)


@functools.cache
def _class_of(kind: Any, act_fn: Any) -> type[_Expert]:
    """Return a class of experts for each class and activation: ``faster`` remembers by class what a module computes."""
    return type(kind.__name__, (_Expert,), {})


def _names(module: Any) -> _Names | None:
    """Return the names that the model's checkpoints have for projections, if they have a tensor for each.

    Return None for checkpoints whose tensors transformers converts in another way than by stacking them.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    found: dict[str, list[str]] = {}
    for one in get_model_conversion_mapping(module):
        kinds = [kind for kind in _KINDS if any(target.endswith(f"experts.{kind}") for target in one.target_patterns)]
        operations = {(type(made).__name__, getattr(made, "dim", None)) for made in getattr(one, "operations", ())}
        if not kinds or not operations:  # other tensors, or other names
            continue
        sources = [match[1] for pattern in one.source_patterns if (match := _SOURCE.search(pattern))]
        if len(sources) < len(one.source_patterns) or not operations <= _STACKING:
            return None
        found[kinds[0]] = sources
    names = [*found.get("gate_up_proj", ()), *found.get("down_proj", ())]
    return _Names(*names) if len(names) == len(_Names._fields) else _Names()


def _is_fused(part: nn.Module, tried: Tried) -> bool:
    """Return whether a module is that of plain experts, down(act(gate(x)) * up(x)), in two fused parameters."""
    act_fn = getattr(part, "act_fn", None)
    if part._parameters.keys() != {*_KINDS} or not callable(act_fn):
        return False
    if part._buffers or not part._modules.keys() <= {"act_fn"} or not len(cast(Any, part.down_proj)):
        return False
    kind = kind_of(part)
    if kind not in tried:
        tried[kind] = _computes_plainly(part, act_fn)
    return bool(tried[kind])


def _computes_plainly(part: Any, act_fn: Any) -> bool:
    generator = torch.Generator().manual_seed(0)
    sizes = (3, 8, 6), (3, 6, 4), (5, 6), (5, 2)
    both, down, x, shares = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes)
    x *= torch.tensor([[1.0], [1e-3], [1e2], [1e4], [1e6]])  # some classes limit large values
    chosen = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [2, 1]])
    stand_in = copy.copy(part)
    parameters = {"gate_up_proj": nn.Parameter(both, False), "down_proj": nn.Parameter(down, False)}
    stand_in.__dict__ = {**part.__dict__, "_parameters": parameters, "num_experts": len(down)}

    def expert(number: int) -> Any:
        def forward(x: Tensor) -> Tensor:
            gate, up = F.linear(x, both[number]).chunk(2, -1)
            return F.linear(act_fn(gate) * up, down[number])

        return forward

    try:
        with torch.inference_mode():
            theirs = type(part).forward(stand_in, x, chosen, shares)
            ours = combined([*map(expert, range(len(down)))], x, shares, chosen)
    except Exception:  # noqa: BLE001 - class or activation need something that is missing here, so none that we know
        return False
    return isinstance(theirs, Tensor) and theirs.shape == ours.shape and torch.allclose(theirs, ours, rtol=1e-9)


__all__ = ["SeparateExperts", "separate_experts"]
