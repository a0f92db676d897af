"""Attention without a cache: the new tokens are one whole sequence, or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_runtime.kernels import recurrence
from medusa_runtime.kernels.paged import masked_attention


class WholeAttention:
    """Attention for a forward pass over one whole sequence: the simplest implementation of ``Attention``.

    With ``sees_later``, tokens see later ones, too, and a window reaches as far in both directions.
    """

    def __init__(self, *, sees_later: bool = False) -> None:
        self._sees_later = sees_later

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        tokens, heads, _ = q.shape
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        if (window is None or window >= tokens) and softcap is None and sinks is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=not self._sees_later, scale=scale)
            return out[0].transpose(0, 1)
        place = torch.arange(tokens, device=q.device)
        distance = place[:, None] - place[None, :]
        distance = distance.abs() if self._sees_later else distance
        mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        if softcap is not None or sinks is not None:
            return masked_attention(q[0], k[0], v[0], mask, scale=scale, softcap=softcap, sinks=sinks).transpose(0, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[0].transpose(0, 1)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return convolve_whole(x, weight, bias, [len(x)])

    def recur(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor | None) -> Tensor:
        return recur_whole(q, k, v, decay, rate, [len(q)])


class WholeTexts:
    """Attention for a forward pass over several whole sequences, which have these numbers of tokens."""

    def __init__(self, lengths: Sequence[int], *, sees_later: bool = False) -> None:
        self.lengths = list(lengths)
        self._each = WholeAttention(sees_later=sees_later)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        parts = zip(*(torch.split(x, self.lengths) for x in (q, k, v)), strict=True)
        return torch.cat([self._each.attend(layer, *part, **options) for part in parts])

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return convolve_whole(x, weight, bias, self.lengths)

    def recur(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor | None) -> Tensor:
        return recur_whole(q, k, v, decay, rate, self.lengths)


def convolve_whole(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: list[int]) -> Tensor:
    """Return ``kernels.recurrence.convolve`` of whole sequences with these numbers of tokens."""
    states = x.new_empty(len(lengths), weight.shape[1] - 1, weight.shape[0])
    return recurrence.convolve(x, weight, bias, states, recurrence.steps_of(lengths))


def recur_whole(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor | None, lengths: list[int]) -> Tensor:
    """Return ``kernels.recurrence.recur`` of whole sequences with these numbers of tokens."""
    states = v.new_empty(len(lengths), v.shape[1], k.shape[2], v.shape[2])
    return recurrence.recur(q, k, v, decay, rate, states, recurrence.steps_of(lengths))
