"""Attention over a paged cache against softmax(q k^T) v written out in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from medusa_runtime import kernels
from medusa_runtime.kernels import native, paged
from torch import Tensor

BLOCK_SIZE = 16


class Batch(NamedTuple):
    q: Tensor
    keys: Tensor
    values: Tensor
    block_tables: Tensor
    sequences: Tensor
    contexts: Tensor


def batch(new_and_seen: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Batch:
    """Sequences of (new tokens, tokens in all); their blocks lie shuffled in the pools, what no one owns is NaN."""
    generator = torch.Generator().manual_seed(heads * head_dim + len(new_and_seen))
    needed = [-(-total // BLOCK_SIZE) for _, total in new_and_seen]
    shuffled = torch.randperm(sum(needed) + 3, generator=generator).int()
    tables = torch.full((len(needed), max(needed) + 1), -1, dtype=torch.int32)
    pools = torch.full((2, len(shuffled), BLOCK_SIZE, kv_heads, head_dim), math.nan, dtype=dtype)
    start = 0
    for sequence, (count, (_, total)) in enumerate(zip(needed, new_and_seen, strict=True)):
        tables[sequence, :count] = shuffled[start : start + count]
        start += count
        slots = torch.arange(total)
        drawn = [torch.randn(2, kv_heads, head_dim, generator=generator) for _ in slots]
        pools[:, tables[sequence, slots // BLOCK_SIZE], slots % BLOCK_SIZE] = torch.stack(drawn, 1).to(dtype)
    sequences = [sequence for sequence, (new, _) in enumerate(new_and_seen) for _ in range(new)]
    contexts = [total - new + 1 + i for new, total in new_and_seen for i in range(new)]
    q = torch.randn(len(sequences), heads, head_dim, generator=generator).to(dtype)
    return Batch(q, pools[0], pools[1], tables, torch.tensor(sequences).int(), torch.tensor(contexts).int())


def exact(b: Batch, scale: float, window: int | None, sinks: Tensor | None = None) -> Tensor:
    rows = []
    group = b.q.shape[1] // b.keys.shape[2]
    for q, sequence, context in zip(b.q.double(), b.sequences.tolist(), b.contexts.tolist(), strict=True):
        slots = torch.arange(max(0, context - window) if window else 0, context)
        blocks = b.block_tables[sequence, slots // BLOCK_SIZE]
        key, value = (
            pool[blocks, slots % BLOCK_SIZE].double().repeat_interleave(group, 1) for pool in (b.keys, b.values)
        )
        scores = torch.einsum("hd,phd->hp", q, key).mul(scale)
        weights = scores.softmax(-1)
        if sinks is not None:
            weights = torch.cat((scores, sinks.double().unsqueeze(1)), 1).softmax(-1)[:, :-1]
        rows.append(torch.einsum("hp,phd->hd", weights, value))
    return torch.stack(rows)


def assert_close(
    found: Tensor, b: Batch, scale: float, window: int | None, sinks: Tensor | None = None, atol: float = 2e-6
) -> None:
    expected = exact(b, scale, window, sinks)
    assert found.dtype is b.q.dtype
    assert found.shape == b.q.shape
    eps = torch.finfo(found.dtype).eps
    assert torch.allclose(found.double(), expected, rtol=eps, atol=max(eps / 8, atol))


CASES = {
    "decode": ([(1, 1), (1, 40), (1, 333), (1, 16)], 8, 2, 64),
    "prefill": ([(70, 70)], 4, 4, 32),
    "chunk": ([(37, 90)], 6, 2, 48),
    "mixed": ([(1, 50), (20, 20), (1, 100), (9, 45)], 4, 1, 128),
    "wide": ([(2, 33)], 71, 1, 64),
    "largest": ([(3, 35)], 2, 2, 256),
}


@pytest.mark.parametrize("window", [None, 1, 24])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_compiled(compiled: native.NativeKernels, dtype: torch.dtype, case: str, window: int | None) -> None:
    b = batch(*CASES[case], dtype)
    assert_close(compiled.attention(*b, scale=0.17, window=window), b, 0.17, window)


@pytest.mark.parametrize("case", ["decode", "mixed", "wide"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_scores_of_a_position_without_a_value(compiled: native.NativeKernels, dtype: torch.dtype, case: str) -> None:
    b = batch(*CASES[case], dtype)
    sinks = (torch.arange(b.q.shape[1]) - 2.5).to(dtype)
    sinks[-1] = -1e4
    for window in (None, 24):
        assert_close(compiled.attention(*b, scale=0.17, window=window, sinks=sinks), b, 0.17, window, sinks)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("case", CASES)
def test_torch(case: str, window: int | None) -> None:
    b = batch(*CASES[case], torch.float32)
    for pool in (b.keys, b.values):
        pool.nan_to_num_()  # torch multiplies masked slots by zero; the cache gives it zeroed memory
    # The attention of torch 2.15 is off by up to 2.6e-6, that of 2.13 by 1.7e-6.
    assert_close(paged.attention(*b, scale=0.17, window=window), b, 0.17, window, atol=4e-6)


def test_blocks_before_the_window_may_be_gone(compiled: native.NativeKernels) -> None:
    b = batch([(4, 100)], 4, 2, 32, torch.float32)
    expected = exact(b, 0.2, 20)
    b.block_tables[0, :4] = 2**30  # reading it would be a fault; the first token sees positions 77 to 96
    found = compiled.attention(*b, scale=0.2, window=20)
    assert torch.allclose(found.double(), expected, atol=2e-6)


def test_large_scores_do_not_overflow(compiled: native.NativeKernels) -> None:
    b = batch([(1, 60)], 2, 1, 32, torch.float32)
    assert_close(compiled.attention(*b, scale=100.0, window=None), b, 100.0, None)


def test_pools_in_another_order_and_q_as_a_slice(compiled: native.NativeKernels) -> None:
    """A fused projection leaves q inside a wider row; a cache may keep heads before slots."""
    b = batch([(1, 70), (3, 20)], 4, 2, 32, torch.bfloat16)
    fused = torch.cat([b.q, torch.zeros_like(b.q)], dim=1)
    moved = [pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in (b.keys, b.values)]
    sliced = b._replace(q=fused[:, :4], keys=moved[0], values=moved[1])
    assert torch.equal(
        compiled.attention(*sliced, scale=0.2, window=None), compiled.attention(*b, scale=0.2, window=None)
    )


@pytest.mark.parametrize("head_dim", [32, 40])
def test_paged_attention_takes_any_head_dim(head_dim: int) -> None:
    b = batch([(1, 20), (5, 9)], 4, 2, head_dim, torch.float32)
    for pool in (b.keys, b.values):
        pool.nan_to_num_()
    with torch.inference_mode():
        assert_close(kernels.paged_attention(*b, scale=0.2), b, 0.2, None)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 2, 16), (1, 2, 16), (2, 2, 32)])
def test_heads_that_do_not_fit_the_cache_are_an_error(heads: int, kv_heads: int, head_dim: int) -> None:
    """The kernel would leave heads of the result as they are in freed memory, or read past the cache."""
    b = batch([(2, 2)], heads, kv_heads, 16, torch.float32)._replace(q=torch.zeros(2, heads, head_dim))
    with torch.inference_mode(), pytest.raises(RuntimeError):
        kernels.paged_attention(*b, scale=1.0)


@pytest.mark.parametrize("window", [None, 24, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 64), (3, 3, 32), (12, 1, 16), (7, 1, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_token_has_the_same_bits_however_its_prompt_is_cut(
    compiled: native.NativeKernels, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int | None
) -> None:
    """A prompt at once, in chunks beside other sequences, and token by token, as in decode."""
    tokens = 203
    b = batch([(tokens, tokens), (50, 90)], heads, kv_heads, head_dim, dtype)
    sinks = torch.linspace(-2, 2, heads).to(dtype)

    def attend(part: Tensor) -> Tensor:
        chosen = b._replace(q=b.q[part], sequences=b.sequences[part], contexts=b.contexts[part])
        return compiled.attention(*chosen, scale=0.3, window=window, sinks=sinks)

    whole = attend(torch.arange(tokens))
    for size in (1, 2, 5, 37, 64):
        for part in torch.arange(tokens).split(size):
            found = attend(torch.cat((part, torch.arange(tokens, tokens + 50))))
            assert torch.equal(found[: len(part)], whole[part])
