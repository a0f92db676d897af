"""Attention over a paged KV cache with torch's operations: gather each sequence's blocks, then attend over them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
    contexts: Tensor,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Like ``paged_attention``, on any device and in any floating point dtype."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    block_size = keys.shape[1]
    runs, lengths = torch.unique_consecutive(sequences, return_counts=True)
    start = 0
    for sequence, length in zip(runs.tolist(), lengths.tolist(), strict=True):
        part = slice(start, start + length)
        start += length
        seen = contexts[part].unsqueeze(1)
        total = int(seen.max())
        first = max(0, int(seen.min()) - window) // block_size if window else 0  # earlier blocks may be freed already
        blocks = block_tables[sequence, first : -(-total // block_size)].long()
        positions = torch.arange(first * block_size, total, device=q.device)
        mask = positions < seen
        if window:
            mask &= positions >= seen - window
        key, value = (pool[blocks].flatten(0, 1)[: len(positions)].transpose(0, 1) for pool in (keys, values))
        found = F.scaled_dot_product_attention(
            q[part].transpose(0, 1), key, value, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != keys.shape[2]
        )
        out[part] = found.transpose(0, 1)
    return out
