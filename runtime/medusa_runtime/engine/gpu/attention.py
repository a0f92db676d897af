"""Attention over the paged KV cache on a GPU: torch's kernels for prefills, a capturable kernel for decodes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import cuda
from ..serving.sequence import Span
from ..torch.kv_cache import BLOCK_TOKENS, KvCache


class DecodeAttention:
    """The ``Attention`` of a step with one new token for each sequence.

    It reads only the tensors it is given, so it can be captured: ``slots`` and ``contexts`` int64 [sequences], and
    ``tables`` int32 [sequences, blocks].
    """

    def __init__(self, cache: KvCache, slots: Tensor, contexts: Tensor, tables: Tensor) -> None:
        self._cache = cache
        self._slots = slots
        self._tables = tables
        self._contexts = contexts

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
        """Write the new keys and values, then attend (``Attention`` of models/base.py)."""
        cuda.write_decode_kv(*self._cache.slots[layer], self._slots, k, v)
        keys, values = self._cache.layers[layer]
        return cuda.paged_decode(q, keys, values, self._tables, self._contexts, scale=scale, window=window)


class _Prefill(NamedTuple):
    rows: slice
    start: int
    stop: int
    blocks: Tensor  # int64


class GpuAttention:
    """The ``Attention`` of one step with any mix of prefills and decodes.

    The leading spans with a single token are handled as decodes.
    """

    def __init__(self, cache: KvCache, spans: list[Span]) -> None:
        self._cache = cache
        device = cache.pool.device
        singles = 0
        while singles < len(spans) and spans[singles].stop - spans[singles].start == 1:
            singles += 1
        slots = [slot for sequence, start, stop in spans for slot in sequence.slots(start, stop)]
        lengths = [stop for _, start, stop in spans for _ in range(start, stop)]
        self._slots, contexts = torch.tensor([slots, lengths]).to(device, non_blocking=True)
        self._singles = singles
        self._decode: DecodeAttention | None = None
        if singles:
            width = max(len(span.sequence.blocks) for span in spans[:singles])
            rows = [[*span.sequence.blocks, *[0] * (width - len(span.sequence.blocks))] for span in spans[:singles]]
            tables = torch.tensor(rows, dtype=torch.int32).to(device, non_blocking=True)
            self._decode = DecodeAttention(cache, self._slots[:singles], contexts[:singles], tables)
        self._prefills: list[_Prefill] = []
        row = singles
        for sequence, start, stop in spans[singles:]:
            needed = sequence.blocks[: -(-stop // BLOCK_TOKENS)] if start else []
            blocks = torch.tensor(needed, dtype=torch.long).to(device, non_blocking=True)
            self._prefills.append(_Prefill(slice(row, row + stop - start), start, stop, blocks))
            row += stop - start

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
        """Write the new keys and values, then attend (``Attention`` of models/base.py)."""
        n = self._singles
        if not self._prefills and self._decode is not None:
            return self._decode.attend(layer, q, k, v, scale=scale, window=window)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._cache.write(layer, self._slots[n:], k[n:], v[n:])
        if self._decode is not None:
            out[:n] = self._decode.attend(layer, q[:n], k[:n], v[:n], scale=scale, window=window)
        for prefill in self._prefills:
            out[prefill.rows] = self._prefill(layer, prefill, q, k, v, scale, window)
        return out

    def _prefill(
        self, layer: int, prefill: _Prefill, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        rows, start, stop, blocks = prefill
        if start:
            keys, values = (pool[blocks].flatten(0, 1)[:stop] for pool in self._cache.layers[layer])
        else:
            keys, values = k[rows], v[rows]  # everything to attend to is in this step
        mask = None
        if start or (window is not None and window < stop):
            places = torch.arange(stop, device=q.device)
            seen = places[start:, None]
            mask = places <= seen
            if window is not None:
                mask &= places > seen - window
        query, keys, values = (part.transpose(0, 1)[None] for part in (q[rows], keys, values))
        found = F.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return found[0].transpose(0, 1)
