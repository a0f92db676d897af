"""One step of the model over a batch of spans, and the tokens that come of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ...models import Attention, DecoderModel
from ..serving.sequence import Sampled, Sequence, Span
from .kv_cache import KvCache
from .paged_attention import PagedAttention
from .sampler import sample


class Runner(Protocol):
    """How an engine's steps are run. Belongs to the engine's thread."""

    def step(self, spans: list[Span]) -> tuple[Tensor | None, list[Sequence]]:
        """See ``run_step``."""

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[Sampled]:
        """See ``sampler.sample``."""

    def use_idle_time(self) -> bool:
        """Do something that can wait, for a fraction of a second, and return whether there was anything to do."""


class CpuRunner:
    def __init__(self, model: DecoderModel, cache: KvCache) -> None:
        self._model = model
        self._cache = cache

    def step(self, spans: list[Span]) -> tuple[Tensor | None, list[Sequence]]:
        return run_step(self._model, self._cache, spans)

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[Sampled]:
        return sample(logits, sequences)

    def use_idle_time(self) -> bool:
        return False


def run_step(
    model: DecoderModel,
    cache: KvCache,
    spans: list[Span],
    attend: Callable[[KvCache, list[Span]], Attention] = PagedAttention,
) -> tuple[Tensor | None, list[Sequence]]:
    """Run the spans; returns the sequences whose last token was among them, after their logits [rows, vocab].

    Afterwards the spans' keys and values are in the cache and count as computed.
    """
    device = cache.pool.device
    attention = attend(cache, spans)
    places = positions_of(spans).to(device)
    ends = [place for place, (sequence, _, stop) in enumerate(spans) if stop == len(sequence.tokens)]
    rows = last_rows(spans, ends).to(device) if ends else None
    logits = model.run(tokens_of(spans).to(device), places, attention, rows)
    for span in spans:
        span.sequence.computed = span.stop
    return logits, [spans[place].sequence for place in ends]


def tokens_of(spans: list[Span]) -> Tensor:
    """The token ids of all spans, [tokens]."""
    return torch.tensor([token for sequence, start, stop in spans for token in sequence.tokens[start:stop]])


def positions_of(spans: list[Span]) -> Tensor:
    """The positions of all spans' tokens, [tokens]."""
    return torch.tensor([place for _, start, stop in spans for place in range(start, stop)])


def last_rows(spans: list[Span], ends: list[int]) -> Tensor:
    """The rows of the last tokens of the spans ``ends`` among the tokens of all spans."""
    rows: list[int] = []
    row = -1
    for place, (_, start, stop) in enumerate(spans):
        row += stop - start
        if place in ends:
            rows.append(row)
    return torch.tensor(rows)


def rows_of(hidden: Tensor, spans: list[Span], ends: list[int]) -> Tensor:
    """The hidden states of the last tokens of the spans ``ends``, of ``hidden`` [tokens, hidden]."""
    rows = last_rows(spans, ends)
    return hidden if len(rows) == len(hidden) else hidden[rows.to(hidden.device)]
