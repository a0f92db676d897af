"""Pooling: one vector for a text from the vectors of its tokens (Sentence-BERT, Reimers and Gurevych 2019, §3)."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean of the tokens: hidden [batch, tokens, size], mask [batch, tokens] (false: padding) → [batch, size]."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)


def first(hidden: Tensor, mask: Tensor) -> Tensor:
    """The first token's vector, BERT's [CLS]: hidden [batch, tokens, size] → [batch, size]."""
    return hidden[:, 0]


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mean": mean, "cls": first}


def unit(vectors: Tensor) -> Tensor:
    """Each vector [..., size] scaled to length 1, so that a dot product is the cosine."""
    return F.normalize(vectors, dim=-1)
