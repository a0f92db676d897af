"""Our attention behind transformers' interface for it; its modules call it with their new keys and values."""

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
STEP = "medusa_step"  # the attribute of an attention module of transformers that holds its ``Step``


class Step:
    """What the attention modules of one model share: the engine's attention for the step that runs."""

    attention: Attention
    head_dim: int
    kv_heads: int

    def begin(self, attention: Attention) -> None:
        self.attention = attention
        self._rotations: dict[int, tuple[Tensor, Rotation]] = {}

    def rotation(self, cos: Tensor, sin: Tensor) -> Rotation:
        """Those of transformers, [1, tokens, head_dim], as our kernels take them: once for all layers of a step."""
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
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, head_dim], key and value alike with kv heads → [1, tokens, heads, value's head_dim].

    The tokens are those of all sequences of a step, one behind the other. A value may be smaller than a key; it is
    padded in the cache.
    """
    step: Step | None = getattr(module, STEP, None)
    if step is None or attention_mask is not None or key.shape[1] != step.kv_heads or key.shape[3] != step.head_dim:
        raise EngineError(
            f"{type(module).__name__} of transformers attends in a way that the torch engine does not support (keys of "
            f"{list(key.shape)}); expected --engine vllm for this model"
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
    """The argument of a forward of transformers that takes its cache: ``cache`` since 5.24, before ``past_key_values``.

    A class of a newer version that is given the older name warns.
    """
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


__all__ = ["NAME", "STEP", "Step", "attend", "cache_argument"]
