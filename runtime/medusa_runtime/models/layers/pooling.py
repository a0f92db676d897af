"""Pooling: one vector for a text from the vectors of its tokens (Sentence-BERT, Reimers and Gurevych 2019, §3)."""

from __future__ import annotations

from collections.abc import Callable

import torch
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


def last_token(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the vector of each text's last token, which has seen all others of a decoder.

    hidden is [batch, tokens, size], with padding behind each text only; mask [batch, tokens] is false for it.
    """
    return hidden[torch.arange(len(hidden)), mask.sum(1) - 1]


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mean": mean, "cls": first_token, "last": last_token}


def label_probabilities(logits: Tensor, *, several: bool) -> Tensor:
    """Return the probability of each label [..., labels]. An only label has a score between 0 and 1.

    ``several``: a text may have more than one of the labels.
    """
    return logits.sigmoid() if several or logits.shape[-1] == 1 else logits.softmax(-1)


def normalized(vectors: Tensor) -> Tensor:
    """Scale each vector [..., size] to length 1, so that a dot product of two is their cosine."""
    return F.normalize(vectors, dim=-1)
