"""Faster versions of transformers' attention modules: projections, norms, rotation, and the engine's attention.

As in ``faster``, a class is recognized by what it computes. Its own forward is tried with random numbers, up to the
call of the engine's attention, and is replaced when one of the formulas here gives the same bits.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers.linear import Linear, project
from .attention import STEP, Step, cache_argument
from .trials import SCALES, Tried, kind_of

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")
_POSITIONS = (3, 70_000, 2_000_000)  # of the tokens in a trial; far apart, to notice a class that scales by position
_DEPTH = 16  # the size of the hidden states in a trial


class _Formula(NamedTuple):
    """What an attention module computes.

    ``norms`` is "whole" if q and k have a norm over all heads, "heads" if each head has one, and empty without norms.
    ``rotated`` says whether rope is applied. ``options`` are passed to the engine's attention.
    """

    norms: str
    rotated: bool
    options: dict[str, Any]


def use_our_attention(part: Any, dtype: torch.dtype, tried: Tried) -> None:
    """Let an attention module compute with fewer operations, if we know the formula of its class."""
    found = [getattr(part, name, None) for name in _PROJECTIONS]
    if not all(isinstance(one, Linear) for one in found) or not hasattr(part, STEP):
        return
    sizes = [cast(Linear, one).out_features for one in found[:3]]
    step: Step = getattr(part, STEP)
    if sizes[1] != sizes[2] or sizes[1] != step.kv_heads * step.head_dim or sizes[0] % step.head_dim:
        return
    norms = [getattr(part, name, None) for name in _NORMS]
    if any(norm is not None and [p.dim() for p in norm.parameters()] != [1] for norm in norms):
        return
    formula = _formula(part, dtype, sizes[0] // step.head_dim, tried)
    if formula is not None:
        part.medusa_formula = formula
        part.__class__ = _faster(cast(Any, type(part)))


@functools.cache
def _faster(kind: Any) -> type:
    cached = cache_argument(kind.forward)

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        formula: _Formula = self.medusa_formula
        step: Step = getattr(self, STEP)
        rotated = position_embeddings is not None and _fits(position_embeddings[0], hidden_states.dtype, step)
        cache = more.pop("past_key_values", cache)
        if attention_mask is not None or cache is not None or (formula.rotated and not rotated):
            return cast(
                tuple[Tensor, None],
                kind.forward(
                    self,
                    hidden_states,
                    position_embeddings=position_embeddings,
                    attention_mask=attention_mask,
                    **{cached: cache},
                    **more,
                ),
            )
        q, k, v = project(hidden_states[0], self.q_proj, self.k_proj, self.v_proj)
        if formula.norms == "whole":
            q, k = self.q_norm(q), self.k_norm(k)
        heads = (len(q), -1, step.head_dim)
        q, k, v = q.view(heads), k.view(heads), v.view(heads)
        if formula.norms == "heads":
            q, k = self.q_norm(q), self.k_norm(k)
        if formula.rotated and position_embeddings is not None:
            q, k = step.rotation(*position_embeddings)(q, k)
        out = step.attention.attend(self.layer_idx, q, k, v, **formula.options)
        return self.o_proj(out.view(1, len(out), -1)), None

    return type(kind.__name__, (kind,), {"forward": forward})


def _fits(cos: Tensor, dtype: torch.dtype, step: Step) -> bool:
    """Return whether cosines have the dtype and the size with which the class was tried."""
    return cos.dtype is dtype and cos.shape[-1] == step.head_dim


# Trials


class _Recorder:
    """A stand-in for the engine's attention, which keeps its arguments and returns ``reply``."""

    def __init__(self, reply: Tensor) -> None:
        self.reply = reply
        self.called: tuple[Tensor, ...] = ()
        self.options: dict[str, Any] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        self.called, self.options = (q, k, v), options
        return self.reply


def _formula(part: Any, dtype: torch.dtype, heads: int, tried: Tried) -> _Formula | None:
    norms = [name for name in _NORMS if getattr(part, name, None) is not None]
    kind = (*kind_of(part), heads, *norms)
    if kind not in tried:
        with torch.inference_mode():
            tried[kind] = _tried(part, dtype, heads, norms)
    found: _Formula | None = tried[kind]
    return found


def _tried(part: Any, dtype: torch.dtype, heads: int, norms: list[str]) -> _Formula | None:
    """Return the formula of the class of ``part``, found with random projections and norms; None if it is unknown."""
    step: Step = getattr(part, STEP)
    generator = torch.Generator().manual_seed(0)
    tokens, size = len(_POSITIONS), step.head_dim

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, rotation = some(1, tokens, _DEPTH), (some(1, tokens, size), some(1, tokens, size))
    x *= torch.tensor(SCALES, dtype=dtype)[:, None]
    weights = [some(count * size, _DEPTH) for count in (heads, step.kv_heads, step.kv_heads)]
    out = some(_DEPTH, heads * size)
    recorder = _Recorder(some(tokens, heads, size))
    modules = {
        name: functools.partial(F.linear, weight=weight)
        for name, weight in zip(_PROJECTIONS, (*weights, out), strict=True)
    }
    found = _called(part, recorder, {**modules, **dict.fromkeys(norms, _centred)}, x, rotation)
    if found is None or not torch.equal(found, F.linear(recorder.reply.view(1, tokens, -1), out)):
        return None
    products = [F.linear(x[0], weight) for weight in weights]
    for kind in ("whole", "heads") if len(norms) == 2 else ("",):
        for rotated in (False, True):
            ours = _plainly(products, size, kind, rotation if rotated else None)
            if all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(ours, recorder.called, strict=True)):
                return _Formula(kind, rotated, recorder.options)
    return None


def _called(
    part: Any, recorder: _Recorder, modules: dict[str, Any], x: Tensor, rotation: tuple[Tensor, Tensor]
) -> Tensor | None:
    """Return what the class of ``part`` computes from ``x`` with other modules; None if no formula here can fit."""
    step = Step()
    step.kv_heads, step.head_dim = getattr(part, STEP).kv_heads, getattr(part, STEP).head_dim
    step.begin(cast(Any, recorder))
    stand_in = copy.copy(part)
    stand_in.__dict__ = {**part.__dict__, STEP: step, "_modules": {**part._modules, **modules}}
    given = {
        "attention_mask": None,
        cache_argument(type(part).forward): None,
        "position_ids": torch.tensor([_POSITIONS]),
    }
    try:
        found = type(part).forward(stand_in, x, position_embeddings=rotation, **given)
    except Exception:  # noqa: BLE001 - the class needs something that is missing here
        return None
    if not recorder.called or "sinks" in recorder.options:
        return None
    return found[0] if isinstance(found, tuple) and len(found) == 2 and found[1] is None else None


def _centred(x: Tensor) -> Tensor:
    """Subtract the mean of each row: a stand-in for a norm, whose result shows which rows it was applied to."""
    return x - x.mean(-1, keepdim=True)


def _plainly(products: list[Tensor], size: int, norms: str, rotation: tuple[Tensor, Tensor] | None) -> list[Tensor]:
    """Compute with plain torch the q, k and v [tokens, heads, size] that the engine's attention should receive."""
    q, k, v = products
    if norms == "whole":
        q, k = _centred(q), _centred(k)
    q, k, v = (x.view(len(x), -1, size) for x in (q, k, v))
    if norms == "heads":
        q, k = _centred(q), _centred(k)
    if rotation is not None:
        q, k = (_rotated(x, *(part[0].unsqueeze(1) for part in rotation)) for x in (q, k))
    return [q, k, v]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


__all__ = ["use_our_attention"]
