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
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the same as ``paged_attention``, on any device and in any floating point dtype.

    ``softcap`` bounds the scores (Gemma 2). ``sinks`` [heads] are the scores of an extra position that has no value
    (GPT-OSS).
    """
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
        query = q[part].transpose(0, 1)
        if softcap is None and sinks is None:
            grouped = q.shape[1] != keys.shape[2]
            found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
        else:
            found = masked_attention(query, key, value, mask, scale=scale, softcap=softcap, sinks=sinks)
        out[part] = found.transpose(0, 1)
    return out


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention of one sequence, with ``softcap`` and ``sinks`` as in ``attention``.

    query is [heads, tokens, size], key and value are [kv_heads, positions, size], and mask [tokens, positions] is True
    for positions that a token sees.
    """
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = query @ key.transpose(1, 2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value
    empty = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
    together = torch.cat((scores, empty), -1)
    together = together - together.amax(-1, keepdim=True)
    return together.softmax(-1)[..., :-1].to(query.dtype) @ value
