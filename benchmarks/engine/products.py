"""Measure matrix products: ours of 16-bit weights beside torch's: ``python -m benchmarks.engine.products``.

A product is rows x depth times depth x columns, as a linear layer's. The shapes are those of Qwen3-0.6B and of larger
models. Ours and torch's run in turn. A ratio is the median of those of the pairs.
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

_SHAPES = ((3072, 1024), (1024, 3072), (2048, 1024), (4096, 4096))  # (columns, depth)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_AT_LEAST = 1e9  # operations of a sample; several weights make it up, so that few rows read them from memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128, 512])
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="of our product's weights and rows")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=7, help="pairs of samples")
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found = []
    print(f"| rows | columns x depth | ours, {given.dtype} | torch, {given.dtype} | torch, fp32 | ours / torch fp32 |")
    print("|---|---|---|---|---|---|")
    with torch.inference_mode():
        for columns, depth in _SHAPES:
            for rows in given.rows:
                row = measure(rows, columns, depth, given.dtype, given.runs)
                found.append(row)
                numbers = " | ".join(f"{row[name]:.0f}" for name in ("ours", "own", "fp32"))
                print(f"| {rows} | {columns} x {depth} | {numbers} | {row['ratio']:.2f} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found))


def measure(rows: int, columns: int, depth: int, dtype: str, runs: int) -> dict[str, float]:
    """Return the medians in GFLOP/s, and the median of the pairs' ratios of ours to torch's in float32."""
    operations = 2.0 * rows * columns * depth
    count = min(max(round(_AT_LEAST / operations), 1), 16)
    own, plain = _DTYPES[dtype], torch.float32
    weights = [torch.randn(columns, depth) for _ in range(count)]
    ways: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], torch.dtype]] = {
        "ours": (kernels.linear, own), "own": (F.linear, own), "fp32": (F.linear, plain),
    }  # fmt: skip
    given = {
        kind: (torch.randn(rows, depth).to(kind), [weight.to(kind) for weight in weights]) for kind in (own, plain)
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, runs):  # the first round is not counted
        for name, (product, kind) in ways.items() if number % 2 else reversed(ways.items()):
            x, these = given[kind]
            began = time.perf_counter()
            for weight in these:
                product(x, weight)
            if number >= 0:
                rates[name].append(operations * count / (time.perf_counter() - began) / 1e9)
    ratios = [ours / theirs for ours, theirs in zip(rates["ours"], rates["fp32"], strict=True)]
    return {"rows": rows, "columns": columns, "depth": depth, "ratio": statistics.median(ratios)} | {
        name: statistics.median(values) for name, values in rates.items()
    }


if __name__ == "__main__":
    main()
