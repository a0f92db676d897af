"""Attention over the paged KV cache, for one step of many sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import kernels
from ...kernels import recurrence
from ..serving.sequence import Span
from .kv_cache import KvCache


class PagedAttention:
    """The ``Attention`` that models call, made for one step.

    It knows where in the cache the step's new tokens go, and which earlier tokens each of them attends to.
    """

    def __init__(self, cache: KvCache, spans: list[Span]) -> None:
        self.spans = spans
        self.cache = cache
        width = max(len(span.sequence.blocks) for span in spans)
        tables: list[list[int]] = []
        slots: list[int] = []
        rows: list[int] = []
        contexts: list[int] = []
        for row, (sequence, start, stop) in enumerate(spans):
            tables.append(sequence.blocks + [0] * (width - len(sequence.blocks)))
            slots += sequence.slots(start, stop)
            rows += [row] * (stop - start)
            contexts += range(start + 1, stop + 1)
        if cache.states is not None:
            starts = torch.tensor([0, *(span.stop - span.start for span in spans)]).cumsum(0)
            places = torch.tensor([sequence.slot for sequence, *_ in spans])
            self.steps = recurrence.Steps(places, torch.tensor([span.start for span in spans]), starts)
        self.slots = torch.tensor(slots)
        self.tables = torch.tensor(tables, dtype=torch.int32)
        self.rows = torch.tensor(rows, dtype=torch.int32)
        self.contexts = torch.tensor(contexts, dtype=torch.int32)

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
        """Write the new keys and values to the cache, then attend (``Attention`` of models/base.py)."""
        self.cache.write(layer, self.slots, k, v)
        keys, values = self.cache.layers[layer]
        places = (self.tables, self.rows, self.contexts)
        if softcap is not None:
            return kernels.paged.attention(
                q, keys, values, *places, scale=scale, window=window, softcap=softcap, sinks=sinks
            )
        return kernels.paged_attention(q, keys, values, *places, scale=scale, window=window, sinks=sinks)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve the new inputs with the last ones of each sequence (``StatefulAttention``)."""
        assert self.cache.states is not None
        return recurrence.convolve(x, weight, bias, self.cache.states.layers[layer][0], self.steps)

    def recur(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor | None) -> Tensor:
        """Update the matrices of each sequence, and read from them (``StatefulAttention``)."""
        assert self.cache.states is not None
        return recurrence.recur(q, k, v, decay, rate, self.cache.states.layers[layer][1], self.steps)
