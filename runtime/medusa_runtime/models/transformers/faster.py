"""Faster versions of parts of transformers' modules: norms, projections of one input, and gated perceptrons.

A step of a small model spends more time in Python and in small operations of torch than in its matrix products. What a
class computes is not looked up by its name. Its own forward is tried with random numbers (``trials``), and a part is
replaced when one of the formulas here gives the same bits.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medusa_runtime.kernels import rms_norm, silu_gate

from ..layers.embedding import Embedding
from ..layers.linear import Linear, project
from .faster_attention import use_our_attention
from .trials import SCALES, Tried, kind_of

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_TRIED = 32  # elements of a row of the input with which a class is tried


def use_our_parts(module: nn.Module, dtype: torch.dtype) -> None:
    """Let a module compute with our kernels: its linear layers, embeddings, norms, gated perceptrons and
    attention.

    ``dtype`` is the dtype in which the classes are tried.
    """
    tried: Tried = {}
    for part in list(module.modules()):
        if type(part) is nn.Linear:
            part.__class__ = Linear
        elif type(part) is nn.Embedding and part.max_norm is None:
            part.__class__ = Embedding
    for part in list(module.modules()):
        _use_our_norm(part, dtype, tried)
        for names in _TOGETHER:
            found = [getattr(part, name, None) for name in names]
            if all(type(one) is Linear for one in found):
                _join(cast("list[Linear]", found))
        if type(getattr(part, "gate_proj", None)) is _Joined and _is_gated(part, tried):
            part.__class__ = _gated(cast(Any, type(part)))
        use_our_attention(part, dtype, tried)


# Norms


class _NormFormula:
    """A root-mean-square norm. ``offset`` is added to the weight.

    With ``once``, the result is rounded only after the multiplication by the weight; otherwise also before it.
    """

    def __init__(self, *, once: bool, offset: float) -> None:
        self.once = once
        self.offset = offset

    def plainly(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if self.once:
            return (normed * (weight.float() + self.offset)).to(x.dtype)
        return normed.to(x.dtype) * weight

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, once=self.once, offset=self.offset)


_FORMULAS = (
    _NormFormula(once=False, offset=0.0),
    _NormFormula(once=True, offset=0.0),
    _NormFormula(once=True, offset=1.0),
)


def _use_our_norm(part: nn.Module, dtype: torch.dtype, tried: Tried) -> None:
    weight = part._parameters.get("weight")
    if weight is None or len(part._parameters) > 1 or part._modules or part._buffers or weight.dim() != 1:
        return
    if weight.dtype is not dtype:
        return
    eps = next((name for name in ("variance_epsilon", "eps") if isinstance(getattr(part, name, None), float)), None)
    formula = None if eps is None else _formula(part, dtype, eps, tried)
    if eps is not None and formula is not None:
        part.__class__ = _norm(cast(Any, type(part)), formula, eps)


def _formula(part: nn.Module, dtype: torch.dtype, eps: str, tried: Tried) -> _NormFormula | None:
    kind = kind_of(part)
    if kind not in tried:
        generator = torch.Generator().manual_seed(0)
        rows, weight = (torch.randn(size, generator=generator) for size in ((len(SCALES), _TRIED), (_TRIED,)))
        x, weight = (rows * torch.tensor(SCALES)[:, None]).to(dtype), weight.to(dtype)
        theirs = _tried(part, {"weight": nn.Parameter(weight, requires_grad=False)}, {}, x)
        known = [one for one in _FORMULAS if theirs is not None and _same(theirs, one, x, weight, getattr(part, eps))]
        tried[kind] = known[0] if known else None
    found: _NormFormula | None = tried[kind]
    return found


def _same(theirs: Tensor, formula: _NormFormula, x: Tensor, weight: Tensor, eps: float) -> bool:
    ours = formula.plainly(x, weight, eps)
    return ours.dtype is theirs.dtype and torch.equal(ours, theirs)


def _tried(part: nn.Module, parameters: dict[str, Any], modules: dict[str, Any], x: Tensor) -> Tensor | None:
    """Return what the class of ``part`` computes from ``x`` with other parameters and modules; None if it fails."""
    stand_in = copy.copy(part)
    stand_in.__dict__ = {**part.__dict__, "_parameters": parameters, "_modules": {**part._modules, **modules}}
    try:
        with torch.inference_mode():
            found = type(part).forward(stand_in, x)
    except Exception:  # noqa: BLE001 - the class needs something that is missing here, so it is none of those we know
        return None
    return found if isinstance(found, Tensor) else None


@functools.cache
def _norm(kind: Any, formula: _NormFormula, eps: str) -> type:
    def forward(self: Any, x: Tensor) -> Tensor:
        return formula(x, self.weight, getattr(self, eps))

    return type(kind.__name__, (kind,), {"forward": forward, "norm_formula": formula})


# Projections of one input


class _Together:
    """Projections that their module calls with the same input. The first call computes all of them."""

    def __init__(self, parts: Iterable[Linear]) -> None:
        self.parts = tuple(parts)
        self.input: Tensor | None = None
        self.outputs: dict[int, Tensor] = {}

    def ready(self) -> bool:
        """Return whether the weights of all projections have been applied: none of them has a gate any more."""
        return not any(part._forward_pre_hooks for part in self.parts)

    def project(self, x: Tensor) -> list[Tensor]:
        """Return each projection of x [..., in]."""
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        found = project(rows, *self.parts)
        return [one if rows is x else one.view(*x.shape[:-1], one.shape[-1]) for one in found]

    def take(self, part: Linear, x: Tensor) -> Tensor:
        if self.input is not x or id(part) not in self.outputs:
            self.input = x
            self.outputs = {id(one): out for one, out in zip(self.parts, self.project(x), strict=True)}
        out = self.outputs.pop(id(part))
        if not self.outputs:
            self.input = None
        return out


class _Joined(Linear):
    """A projection that is computed together with others of the same input."""

    together: _Together

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is not None or not self.together.ready():
            return super().forward(input, residual)
        return self.together.take(self, input)


def _join(parts: list[Linear]) -> None:
    if len({part.in_features for part in parts}) == 1:
        together = _Together(parts)
        for part in parts:
            part.__class__ = _Joined
            cast(_Joined, part).together = together


# Gated perceptrons


@functools.cache
def _gated(kind: Any) -> type:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate_proj = self.gate_proj
        if type(gate_proj) is not _Joined or type(self.up_proj) is not _Joined or not gate_proj.together.ready():
            return cast(Tensor, kind.forward(self, x))
        gate, up = gate_proj.together.project(x)
        out = silu_gate(gate.flatten(0, -2), up.flatten(0, -2)).view(*x.shape[:-1], gate.shape[-1])
        return cast(Tensor, self.down_proj(out))

    return type(kind.__name__, (kind,), {"forward": forward})


def _is_gated(part: nn.Module, tried: Tried) -> bool:
    """Return whether ``part`` computes exactly down_proj(silu(gate_proj(x)) * up_proj(x))."""
    kind = kind_of(part)
    if kind not in tried:
        generator = torch.Generator().manual_seed(0)
        sizes = (len(SCALES), _TRIED, _TRIED, _TRIED)
        x, *weights = (torch.randn(size, _TRIED, generator=generator) for size in sizes)
        x *= torch.tensor(SCALES)[:, None]
        gate, up, down = (functools.partial(F.linear, weight=weight) for weight in weights)
        theirs = _tried(part, {}, {"gate_proj": gate, "up_proj": up, "down_proj": down}, x)
        tried[kind] = theirs is not None and torch.equal(theirs, down(F.silu(gate(x)) * up(x)))
    return bool(tried[kind])


__all__ = ["use_our_parts"]
