"""The engine's attention behind transformers' interface for attention.

The modules of transformers call it with their new keys and values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import EngineError
from ..base import Attention
from ..layers.rope import Rotation

NAME = "medusa"
_IDLE = frozenset({"position_ids", "cache_position"})  # tensors that modules pass on, and that change no attention
STEP = "medusa_step"  # the attribute of an attention module of transformers that holds its ``Step``


class Step:
    """The state that the attention modules of one model share: the engine's attention for the running step."""

    attention: Attention
    head_dim: int
    kv_heads: int

    def begin(self, attention: Attention) -> None:
        self.attention = attention
        self._rotations: dict[int, tuple[Tensor, Rotation]] = {}

    def rotation(self, cos: Tensor, sin: Tensor) -> Rotation:
        """Convert transformers' cosines and sines [1, tokens, head_dim] for our kernels, once per step."""
        if id(sin) not in self._rotations:
            low, high = sin[0].unsqueeze(1).chunk(2, -1)
            self._rotations[id(sin)] = sin, Rotation(cos[0].unsqueeze(1), torch.cat((-low, high), -1))
        return self._rotations[id(sin)][1]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a module of transformers, and return it with None in the place of the weights.

    query is [1, heads, tokens, head_dim], key and value are [1, kv_heads, tokens, head_dim], and the result is [1,
    tokens, heads, head_dim of value]. The tokens are those of all sequences of a step, one after another. A value may
    have a smaller head_dim than a key, and is padded in the cache. Raises EngineError for attention of another kind.
    """
    step: Step | None = getattr(module, STEP, None)
    known = step is not None and (key.shape[1], key.shape[3]) == (step.kv_heads, step.head_dim)
    changing = [name for name, one in others.items() if isinstance(one, Tensor) and name not in _IDLE]
    if step is None or not known or attention_mask is not None or value.shape[3] > step.head_dim or changing:
        found = "".join(f", {name}" for name in changing)
        raise EngineError(
            f"{type(module).__name__} of transformers attends in a way that the torch engine does not support (keys of "
            f"{list(key.shape)}, values of {list(value.shape)}{found}); expected --engine vllm for this model"
        )
    size = value.shape[3]
    if size != step.head_dim:
        value = F.pad(value, (0, step.head_dim - size))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    more = {"softcap": softcap, "sinks": s_aux} if softcap is not None or s_aux is not None else {}
    out = step.attention.attend(module.layer_idx, q, k, v, scale=scale, window=sliding_window, **more)  # type: ignore[arg-type]
    return out[..., :size].unsqueeze(0), None


def cache_argument(forward: Callable[..., Any]) -> str:
    """Return the name of the argument that takes the cache in a forward of transformers.

    It is ``cache`` since version 5.24, and ``past_key_values`` before. Newer classes warn about the older name.
    """
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


__all__ = ["NAME", "STEP", "Step", "attend", "cache_argument"]
