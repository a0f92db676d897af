"""Functions that layers of transformers with states call, computed by our kernels for all sequences of a step at once.

Such a layer calls a convolution, and then linear attention (Mamba 2's, or the gated delta rule), as functions of its
file. It gets ours in their place if a trial with random numbers shows that they compute the same.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import StatefulAttention, StateShape
from ..layers.whole import WholeAttention


class _Running(threading.local):
    """The step's attention, and the number of the layer that runs."""

    attention: StatefulAttention
    layer: int


_running = _Running()


@contextmanager
def running(attention: StatefulAttention, layer: int) -> Iterator[None]:
    """Let our functions compute with an attention, as this layer."""
    before = vars(_running).copy()
    _running.attention, _running.layer = attention, layer
    try:
        yield
    finally:
        vars(_running).update(before)


def _convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """Return what ``causal_conv1d_fn`` does for [1, channels, tokens], behind the earlier tokens of each sequence."""
    x = hidden_states[0].T
    out = _running.attention.convolve(_running.layer, x.to(weight.dtype), weight, bias)
    if activation is not None:
        from transformers.activations import ACT2FN

        out = ACT2FN[activation](out)
    return out.to(x.dtype).T.unsqueeze(0)


def _scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """Return what ``mamba2_chunk_scan`` does for hidden_states [1, tokens, heads, value_dim], without a final state."""
    step = dt[0]
    if dt_bias is not None:
        step = step + dt_bias.to(step.dtype)
    if dt_softplus:
        step = F.softplus(step)
    step = step.clamp(*dt_limit).float()
    x = hidden_states[0].float()
    values, decay = x * step.unsqueeze(-1), torch.exp(A.float() * step)
    out = _running.attention.recur(_running.layer, C[0].float(), B[0].float(), values, decay, None)
    if D is not None:
        out = out + D.unsqueeze(-1) * x
    return (out.unsqueeze(0), None) if return_final_states else out.unsqueeze(0)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return what ``torch_chunk_gated_delta_rule`` does for [1, tokens, heads, dim], without a final state."""
    q, k = query[0].float(), key[0].float()
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    values, decay, rate = value[0].float(), torch.exp(g[0].float()), beta[0].float()
    out = _running.attention.recur(_running.layer, q * q.shape[-1] ** -0.5, k, values, decay, rate)
    return out.to(query.dtype).unsqueeze(0), None


_OURS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution, "mamba2_chunk_scan": _scan, "torch_chunk_gated_delta_rule": _delta_rule,
}  # fmt: skip
# Functions of a layer's file that it calls in other cases, or that change nothing without padding.
_OTHERS = frozenset(
    {
        "causal_conv1d_update", "mamba2_selective_state_update", "mamba2_split_conv1d_scan_combined",
        "torch_recurrent_gated_delta_rule", "apply_mask_to_padding_states",
    }
)  # fmt: skip


def with_our_functions(kind: type) -> Callable[..., Any] | None:
    """Return the forward of a layer's class with our functions; None if it calls others, or they compute otherwise."""
    forward = inspect.unwrap(cast(Any, kind).forward)
    if not isinstance(forward, FunctionType):
        return None
    scope = forward.__globals__
    called = {
        name
        for name in forward.__code__.co_names
        if callable(found := scope.get(name)) and getattr(found, "__module__", "") == kind.__module__
    }
    ours = {name: function for name, function in _OURS.items() if name in called}
    if "causal_conv1d_fn" not in ours or called - {*_OURS, *_OTHERS}:
        return None
    if not all(_computes(name, scope[name]) for name in ours):
        return None
    made = FunctionType(
        forward.__code__, {**scope, **ours}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


@functools.cache
def _computes(name: str, theirs: Callable[..., Any]) -> bool:
    """Return whether a function of transformers computes what ours does, of random numbers."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    trials: Mapping[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
        "causal_conv1d_fn": [
            ((made(1, 8, 5), made(8, 4)), {"bias": made(8), "activation": "silu"}),
            ((made(1, 8, 5), made(8, 3)), {"bias": None, "activation": None}),
        ],
        "mamba2_chunk_scan": [
            (
                (made(1, 5, 4, 8), made(1, 5, 4), -made(4).abs(), made(1, 5, 2, 8), made(1, 5, 2, 8)),
                {
                    "chunk_size": 2, "D": made(4), "z": None, "return_final_states": True, "dt_bias": made(4),
                    "dt_softplus": True, "initial_states": None, "dt_limit": (0.1, 0.9),
                },
            )
        ],
        "torch_chunk_gated_delta_rule": [
            (
                (made(1, 5, 2, 8), made(1, 5, 2, 8), made(1, 5, 4, 8)),
                {
                    "g": -made(1, 5, 4).abs(), "beta": made(1, 5, 4).sigmoid(), "initial_state": None,
                    "output_final_state": True, "use_qk_l2norm_in_kernel": norm,
                },
            )
            for norm in (False, True)
        ],
    }  # fmt: skip
    try:
        with torch.inference_mode(), running(WholeAttention(), 0):
            for places, options in trials[name]:
                found, expected = (function(*places, **options) for function in (_OURS[name], theirs))
                if isinstance(expected, tuple):
                    found, expected = found[0], expected[0]
                if found.dtype is not expected.dtype or not torch.allclose(found, expected, rtol=1e-3, atol=1e-4):
                    return False
    except Exception:  # noqa: BLE001 - it takes other arguments, so it is none of those we know
        return False
    return True


class ShapesOfStates:
    """An attention for a trial, which notes what a layer keeps of a sequence."""

    def __init__(self) -> None:
        self.inputs: list[StateShape] = []
        self.matrices: list[StateShape] = []

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.inputs.append(StateShape((weight.shape[1] - 1, weight.shape[0])))
        return torch.empty_like(x)

    def recur(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor | None) -> Tensor:
        self.matrices.append(StateShape((v.shape[1], k.shape[2], v.shape[2]), torch.float32))
        return torch.empty_like(v)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
        raise NotImplementedError  # such a layer does not attend


__all__ = ["ShapesOfStates", "running", "with_our_functions"]
