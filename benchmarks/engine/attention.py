"""Measure the attention of whole prompts: ours beside torch's: ``python -m benchmarks.engine.attention``.

Ours reads keys and values from a paged cache in bf16, and torch's ``scaled_dot_product_attention`` contiguous ones. The
shapes are those of Qwen3-0.6B and of Llama 3.2 1B. Ours and torch's run in turn. A ratio is the median of those of the
pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from medusa_runtime import kernels
from torch import Tensor

_SHAPES = ((16, 8, 128), (32, 8, 64))  # (heads, heads of keys, head_dim)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_BLOCK_TOKENS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="bf16", help="of our queries, keys and values")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5, help="pairs of samples")
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found = []
    print(f"| tokens | heads | ours, {given.dtype} | torch, {given.dtype} | torch, fp32 | ours / torch fp32 |")
    print("|---|---|---|---|---|---|")
    with torch.inference_mode():
        for shape in _SHAPES:
            for tokens in given.tokens:
                row = measure(tokens, *shape, dtype=given.dtype, runs=given.runs)
                found.append(row)
                numbers = " | ".join(f"{row[name]:.0f}" for name in ("ours", "own", "fp32"))
                heads = f"{shape[0]} / {shape[1]} of {shape[2]}"
                print(f"| {tokens} | {heads} | {numbers} | {row['ratio']:.2f} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found))


def measure(tokens: int, heads: int, kv_heads: int, head_dim: int, *, dtype: str, runs: int) -> dict[str, float]:
    """Return the medians in GFLOP/s, and the median of the pairs' ratios of ours to torch's in float32.

    Only products with keys that a token sees are counted as operations.
    """
    operations = 2.0 * tokens * (tokens + 1) * heads * head_dim
    own = _DTYPES[dtype]
    q, k, v = (torch.randn(tokens, count, head_dim) for count in (heads, kv_heads, kv_heads))
    ways: dict[str, Callable[[], Tensor]] = {
        "ours": _paged(*(part.to(own) for part in (q, k, v))),
        "own": _contiguous(*(part.to(own) for part in (q, k, v))),
        "fp32": _contiguous(q, k, v),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, runs):  # the first round is not counted
        for name, attend in ways.items() if number % 2 else reversed(ways.items()):
            began = time.perf_counter()
            attend()
            if number >= 0:
                rates[name].append(operations / (time.perf_counter() - began) / 1e9)
    ratios = [ours / theirs for ours, theirs in zip(rates["ours"], rates["fp32"], strict=True)]
    return {"tokens": tokens, "heads": heads, "head_dim": head_dim, "ratio": statistics.median(ratios)} | {
        name: statistics.median(values) for name, values in rates.items()
    }


def _paged(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """Return our attention over a cache whose blocks lie in any order."""
    tokens, blocks = len(q), -(-len(q) // _BLOCK_TOKENS)
    table = torch.randperm(blocks)
    keys, values = (x.new_zeros(blocks, _BLOCK_TOKENS, *x.shape[1:]) for x in (k, v))
    for pool, x in ((keys, k), (values, v)):
        pool[table[torch.arange(tokens) // _BLOCK_TOKENS], torch.arange(tokens) % _BLOCK_TOKENS] = x
    places = (table[None].int(), torch.zeros(tokens, dtype=torch.int32), torch.arange(1, tokens + 1).int())
    return lambda: kernels.paged_attention(q, keys, values, *places, scale=q.shape[2] ** -0.5)


def _contiguous(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    parts = [x.transpose(0, 1)[None].contiguous() for x in (q, k, v)]
    return lambda: F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)


if __name__ == "__main__":
    main()
