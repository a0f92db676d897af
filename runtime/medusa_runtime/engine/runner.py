"""One step of the model over a batch of spans."""

from __future__ import annotations

import torch
from torch import Tensor

from ..models import DecoderModel
from .kv_cache import KvCache
from .paged_attention import PagedAttention
from .sequence import Sequence, Span


def run_step(model: DecoderModel, cache: KvCache, spans: list[Span]) -> tuple[Tensor | None, list[Sequence]]:
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
    attention = PagedAttention(cache, spans)
    places = torch.tensor(positions)
    hidden = model.run_layers(model.embed(torch.tensor(token_ids), places), places, attention)
    for span in spans:
        span.sequence.computed = span.stop
    if not finished:
        return None, finished
    if len(finished) < len(token_ids):
        hidden = hidden[torch.tensor(last_rows)]
    return model.logits(hidden), finished
