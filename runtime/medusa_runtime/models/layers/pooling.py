"""Pooling: one vector for a text from the vectors of its tokens (Sentence-BERT, Reimers and Gurevych 2019, §3)."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each text's tokens [batch, size].

    hidden is [batch, tokens, size]; mask [batch, tokens] is false for padding.
    """
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)


def first_token(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the vector of the first token, BERT's [CLS]: hidden [batch, tokens, size] → [batch, size]."""
    return hidden[:, 0]


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mean": mean, "cls": first_token}


def normalized(vectors: Tensor) -> Tensor:
    """Scale each vector [..., size] to length 1, so that a dot product of two is their cosine."""
    return F.normalize(vectors, dim=-1)
