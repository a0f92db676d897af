"""One step of the model over a batch of spans, and the tokens that come of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ...models import Attention, DecoderModel
from ..serving.sequence import Sequence, Span
from .kv_cache import KvCache
from .paged_attention import PagedAttention
from .sampler import Sampled, sample


class Runner(Protocol):
    """How an engine's steps are run. Belongs to the engine's thread."""

    def step(self, spans: list[Span]) -> tuple[Tensor | None, list[Sequence]]:
        """See ``run_step``."""

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[Sampled]:
        """See ``sampler.sample``."""

    def use_idle_time(self) -> bool:
        """Do something that need not be done now, for a fraction of a second; whether there was anything."""


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
    """Run the spans; logits [rows, vocab] for the sequences whose last token was among them, and these sequences.

    Afterwards the spans' keys and values are in the cache and count as computed.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    last_rows: list[int] = []
    finished: list[Sequence] = []
    for sequence, start, stop in spans:
        token_ids += sequence.tokens[start:stop]
        positions += range(start, stop)
        if stop == len(sequence.tokens):
            last_rows.append(len(token_ids) - 1)
            finished.append(sequence)
    attention = attend(cache, spans)
    device = cache.pool.device
    places = torch.tensor(positions).to(device)
    hidden = model.run_layers(model.embed(torch.tensor(token_ids).to(device), places), places, attention)
    for span in spans:
        span.sequence.computed = span.stop
    if not finished:
        return None, finished
    if len(finished) < len(token_ids):
        hidden = hidden[torch.tensor(last_rows).to(device)]
    return model.logits(hidden), finished
