"""Decode attention over a paged KV cache on a GPU: one new token per sequence, its context split over processors.

This is Flash-decoding (Dao et al., 2023) over a block table (PagedAttention, Kwon et al. 2023, section 4.1). The grid
depends only on the number of sequences, and the contexts are read from memory, so a captured launch is right for any
contexts. Importing this module imports triton, which takes a tenth of a second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64  # how many tokens of context are loaded together
_LEAST_ROWS = 16  # the fewest rows that tl.dot multiplies
_MOST_SPLITS = 16
_PROGRAMS_A_PROCESSOR = 2


def _named(name: str, *constants: str) -> Callable[[Any], str]:
    """Put these constants into the name of a compiled kernel: captured graphs find kernels by their names.

    One model has variants for several numbers of splits, and of windows where layers differ in them.
    """

    def named(specialization: Any) -> str:
        # Names, not positions: triton leaves constants that are None out.
        values = (f"{key.lower()}{specialization.constants.get(key, 0)}" for key in constants)
        return "_".join((name, *values))

    return named


# Neither the width of the block tables nor the place of the contexts makes a variant of its own: an eager step would
# wait for its compilation, most of a second, when the longest text has come to another width.
@triton.jit(  # type: ignore[untyped-decorator]
    repr=_named("_attend", "SPLITS", "WINDOW"),
    do_not_specialize=["table_row"],
    do_not_specialize_on_alignment=["contexts"],
)
def _attend(  # type: ignore[no-untyped-def]
    q, keys, values, tables, contexts, out, sums, maxima,
    scale,
    q_token, q_head,
    key_block, key_slot, key_head,
    value_block, value_slot, value_head,
    table_row,
    heads,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Attend with a sequence's queries of one kv head to one part of its context. ``out`` is not normalized yet."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(contexts + sequence).to(tl.int32)
    first = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else 0
    tiles = tl.cdiv(context, TILE)
    each = tl.cdiv(tiles - first // TILE, SPLITS)
    begin = first // TILE + split * each
    end = tl.minimum(begin + each, tiles)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    in_group = rows < GROUP
    in_head = dims < HEAD_DIM
    head = kv_head * GROUP + rows
    query = tl.load(
        q + sequence * q_token + head[:, None] * q_head + dims[None, :],
        mask=in_group[:, None] & in_head[None, :],
        other=0.0,
    )
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, DIMS], tl.float32)
    for tile in range(begin, end):
        places = tile * TILE + tl.arange(0, TILE)
        seen = (places < context) & (places >= first)
        block = tl.load(tables + sequence * table_row + places // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        slot = places % BLOCK_SIZE
        key = tl.load(
            keys + (block * key_block + slot * key_slot + kv_head * key_head)[None, :] + dims[:, None],
            mask=in_head[:, None] & seen[None, :],
            other=0.0,
        )
        scores = tl.dot(query, key, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(maximum - higher)
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(
            values + (block * value_block + slot * value_slot + kv_head * value_head)[:, None] + dims[None, :],
            mask=seen[:, None] & in_head[None, :],
            other=0.0,
        )
        result = result * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        maximum = higher
    place = (sequence * heads + head) * SPLITS + split
    tl.store(out + place[:, None] * DIMS + dims[None, :], result, mask=in_group[:, None])
    tl.store(sums + place, total, mask=in_group)
    tl.store(maxima + place, maximum, mask=in_group)


@triton.jit(repr=_named("_combine", "SPLITS"))  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    parts, sums, maxima, out,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one head of one token.

    A split without context has sum 0 and maximum -inf: it adds nothing.
    """
    head = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, DIMS)
    splits = tl.arange(0, SPLITS)
    maximum = tl.load(maxima + head * SPLITS + splits)
    weight = tl.exp(maximum - tl.max(maximum, 0))
    total = tl.sum(tl.load(sums + head * SPLITS + splits) * weight, 0)
    part = tl.load(parts + (head * SPLITS + splits)[:, None] * DIMS + dims[None, :])
    result = tl.sum(part * weight[:, None], 0) / total
    tl.store(out + head * HEAD_DIM + dims, result, mask=dims < HEAD_DIM)


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    k, v, keys, values, slots,
    k_token, k_head, v_token, v_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Write one kv head of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, DIMS)
    mask = dims < HEAD_DIM
    place = (tl.load(slots + token) * KV_HEADS + head) * HEAD_DIM
    tl.store(keys + place + dims, tl.load(k + token * k_token + head * k_head + dims, mask=mask), mask=mask)
    tl.store(values + place + dims, tl.load(v + token * v_token + head * v_head + dims, mask=mask), mask=mask)


def write(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k and v [tokens, kv_heads, head_dim] to ``slots`` (int64 [tokens]) of [all slots, kv_heads, head_dim].

    Not torch's index_copy: its launch contains the number of slots, which a captured launch would keep.
    """
    count, kv_heads, head_dim = k.shape
    k, v = (part if part.stride(2) == 1 else part.contiguous() for part in (k, v))
    if count:
        _write[(count, kv_heads)](
            k, v, keys, values, slots,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            KV_HEADS=kv_heads, HEAD_DIM=head_dim, DIMS=triton.next_power_of_2(head_dim), num_warps=1,
        )  # fmt: skip


def decode(
    q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, contexts: Tensor, *, scale: float, window: int | None
) -> Tensor:
    """Return attention of one new token per sequence: [sequences, heads, head_dim].

    q: [sequences, heads, head_dim].
    keys, values: [blocks, block_size, kv_heads, head_dim], contiguous in the last dimension.
    block_tables: int32 [sequences, max_blocks].
    contexts: [sequences], how many tokens are seen, including the new one (at least 1).

    Blocks that no token sees are not read.
    """
    count, heads, head_dim = q.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    dims = triton.next_power_of_2(head_dim)
    rows = max(triton.next_power_of_2(group), _LEAST_ROWS)
    splits = splits_for(count * kv_heads, _processors(q.device))
    parts = q.new_empty((count, heads, splits, dims), dtype=torch.float32)
    sums, maxima = q.new_empty((2, count, heads, splits), dtype=torch.float32)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if q.stride(2) != 1:
        q = q.contiguous()
    _attend[(count, kv_heads, splits)](
        q, keys, values, block_tables, contexts, parts, sums, maxima,
        scale,
        q.stride(0), q.stride(1),
        *keys.stride()[:3],
        *values.stride()[:3],
        block_tables.stride(0),
        heads,
        WINDOW=window or 0, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=keys.shape[1],
        ROWS=rows, DIMS=dims, TILE=_TILE, SPLITS=splits,
        num_warps=8 if rows > 64 else 4, num_stages=2,
    )  # fmt: skip
    _combine[(count * heads,)](parts, sums, maxima, out, HEAD_DIM=head_dim, DIMS=dims, SPLITS=splits, num_warps=2)
    return out


def splits_for(programs: int, processors: int) -> int:
    """Return into how many parts to split each context, a power of two: the fewer sequences, the more parts.

    ``programs`` is how many programs one part needs, ``processors`` how many the GPU has.
    """
    splits = 1
    while splits < _MOST_SPLITS and programs * splits * 2 <= processors * _PROGRAMS_A_PROCESSOR:
        splits *= 2
    return splits


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
