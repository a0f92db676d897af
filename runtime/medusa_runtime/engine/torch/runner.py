"""Runs one step of the model over a batch of spans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ...models import Attention, DecoderModel
from ..serving.sequence import SampledToken, Sequence, Span
from .kv_cache import KvCache
from .paged_attention import PagedAttention
from .prompt_scoring import needs_scores, score_prompts, scored_rows
from .sampler import sample
from .transfers import on_host


class Runner(Protocol):
    """Runs an engine's steps on its device. Belongs to the engine's thread."""

    def prepare(self, *, eagerly: bool = False) -> None:
        """Begin in the background what the first steps need. ``eagerly``: they run without graphs, as a group's do."""

    def step(self, spans: list[Span]) -> tuple[Tensor | None, list[Sequence]]:
        """Run the spans, and return logits and sequences like ``run_step``."""

    def forward(self, spans: list[Span], hidden: Tensor | None = None) -> Forward:
        """Begin a forward pass that runs range by range, for a worker that shares it with others."""

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        """Choose a token for each sequence, like ``sampler.sample``."""

    def use_idle_time(self) -> bool:
        """Do a fraction of a second of work that can wait, and return whether there was any."""

    def close(self) -> None:
        """Wait until nothing runs in the background any more."""


class CpuRunner:
    def __init__(self, model: DecoderModel, cache: KvCache) -> None:
        self._model = model
        self._cache = cache

    def prepare(self, *, eagerly: bool = False) -> None:
        pass

    def step(self, spans: list[Span]) -> tuple[Tensor | None, list[Sequence]]:
        return run_step(self._model, self._cache, spans)

    def forward(self, spans: list[Span], hidden: Tensor | None = None) -> Forward:
        return Forward(self._model, self._cache, spans, hidden)

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        return sample(logits, sequences)

    def use_idle_time(self) -> bool:
        return False

    def close(self) -> None:
        pass


class Forward:
    """One forward pass over spans, of which one range of layers runs after another, on the cache's device."""

    def __init__(
        self,
        model: DecoderModel,
        cache: KvCache,
        spans: list[Span],
        hidden: Tensor | None = None,
        make_attention: Callable[[KvCache, list[Span]], Attention] = PagedAttention,
    ) -> None:
        """Begin with ``hidden`` [tokens, hidden] of the host, the result of earlier layers, or else with the embedding.

        Waits until the embedding is loaded.
        """
        device = cache.pool.device
        self._model = model
        self._spans = spans
        self._attention = make_attention(cache, spans)
        self._positions = positions_of(spans).to(device)
        self._hidden = (
            model.embed(tokens_of(spans).to(device), self._positions) if hidden is None else hidden.to(device)
        )

    def run_layers(self, start: int, stop: int) -> None:
        """Run the layers [start, stop), which come after those that have run."""
        self._hidden = self._model.run_layers(self._hidden, self._positions, self._attention, start, stop)

    def logits(self, ends: list[int]) -> Tensor:
        """Return the logits [ends, vocab], on the device, of the last tokens of the spans with these indices."""
        return self._model.logits(select_rows(self._hidden, self._spans, ends))

    def score_prompts(self) -> None:
        """Score the tokens of the spans' prompts, for sequences that ask for it, once the last layer has run."""
        vocab_size = self._model.config.vocab_size
        score_prompts(
            self._spans, lambda rows: self._model.logits(self._hidden[rows.to(self._hidden.device)]), vocab_size
        )

    def hidden(self) -> Tensor:
        """Return the hidden states [tokens, hidden] in the host's memory. On a GPU, waits for the layers."""
        return on_host(self._hidden)


def run_step(
    model: DecoderModel,
    cache: KvCache,
    spans: list[Span],
    make_attention: Callable[[KvCache, list[Span]], Attention] = PagedAttention,
) -> tuple[Tensor | None, list[Sequence]]:
    """Run the spans, and return the logits [rows, vocab] of each sequence's last token, and these sequences.

    Sequences of which a span does not reach the last token are left out; if none is left, the logits are None.
    Afterwards the keys and values of all spans are in the cache and count as computed, and the tokens of prompts are
    scored for sequences that ask for it.
    """
    if needs_scores(spans):
        return _run_scored_step(model, cache, spans, make_attention)
    device = cache.pool.device
    attention = make_attention(cache, spans)
    places = positions_of(spans).to(device)
    ends = [place for place, (sequence, _, stop) in enumerate(spans) if stop == len(sequence.tokens)]
    rows = last_rows(spans, ends).to(device) if ends else None
    logits = model.run(tokens_of(spans).to(device), places, attention, rows)
    for span in spans:
        span.sequence.computed = span.stop
    return logits, [spans[place].sequence for place in ends]


def _run_scored_step(
    model: DecoderModel, cache: KvCache, spans: list[Span], make_attention: Callable[[KvCache, list[Span]], Attention]
) -> tuple[Tensor | None, list[Sequence]]:
    """Run a step like ``run_step``, with prompts whose tokens are scored."""
    ends = [place for place, (sequence, _, stop) in enumerate(spans) if stop == len(sequence.tokens)]
    if model.config.is_foreign:
        logits = _run_scored_at_once(model, cache, spans, ends, make_attention)
    else:
        forward = Forward(model, cache, spans, make_attention=make_attention)
        forward.run_layers(0, len(model.layers))
        forward.score_prompts()
        logits = forward.logits(ends) if ends else None
    for span in spans:
        span.sequence.computed = span.stop
    return logits, [spans[place].sequence for place in ends]


def _run_scored_at_once(
    model: DecoderModel,
    cache: KvCache,
    spans: list[Span],
    ends: list[int],
    make_attention: Callable[[KvCache, list[Span]], Attention],
) -> Tensor | None:
    """Run a step of a model that computes all logits in one call, as transformers' do, and score its prompts.

    The scheduler keeps the prompts' chunks small for such a model. Returns the logits of the spans' ``ends``.
    """
    last = last_rows(spans, ends).tolist()
    rows = sorted({*last, *scored_rows(spans)})
    place = {row: number for number, row in enumerate(rows)}
    attention = make_attention(cache, spans)
    logits = model.run(tokens_of(spans), positions_of(spans), attention, torch.tensor(rows, dtype=torch.long))
    assert logits is not None
    found = logits
    score_prompts(spans, lambda wanted: found[[place[row] for row in wanted.tolist()]], model.config.vocab_size)
    return found[[place[row] for row in last]] if ends else None


def tokens_of(spans: list[Span]) -> Tensor:
    """Return the token ids of all spans, int64 [tokens]."""
    return torch.tensor([token for sequence, start, stop in spans for token in sequence.tokens[start:stop]])


def positions_of(spans: list[Span]) -> Tensor:
    """Return the positions of all spans' tokens, int64 [tokens]."""
    return torch.tensor([place for _, start, stop in spans for place in range(start, stop)])


def last_rows(spans: list[Span], ends: list[int]) -> Tensor:
    """Return the rows of the last tokens of some spans, among the rows of all spans' tokens.

    ``ends`` has the indices of these spans in ``spans``.
    """
    rows: list[int] = []
    row = -1
    for place, (_, start, stop) in enumerate(spans):
        row += stop - start
        if place in ends:
            rows.append(row)
    return torch.tensor(rows, dtype=torch.long)


def select_rows(hidden: Tensor, spans: list[Span], ends: list[int]) -> Tensor:
    """Select from ``hidden`` [tokens, hidden] the rows of ``last_rows``."""
    rows = last_rows(spans, ends)
    return hidden if len(rows) == len(hidden) else hidden[rows.to(hidden.device)]
