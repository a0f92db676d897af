"""Measure how fast the CPU multiplies: ``python -m benchmarks.engine.kernels``.

One run has products of one shape by torch, by our kernels, and without compiled kernels, in turn. The weights rotate,
as in a model, so that none is still in the cache when its turn comes again.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from medusa_adapters.bench.result import Result
from medusa_runtime import kernels
from medusa_runtime.kernels import upcast
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
CONTESTANTS: dict[str, Product] = {"torch": F.linear, "medusa": kernels.linear, "upcast": upcast.linear}
ROTATED_BYTES = 256 << 20  # more than the last-level cache of most CPUs


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.kernels", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 256], help="tokens in the batch (M)"
    )
    parser.add_argument("--cols", type=int, default=8192, help="output features (N)")
    parser.add_argument("--depth", type=int, default=2048, help="input features (K)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    print(f"{arguments.dtype}: {kernels.describe()[arguments.dtype]}; {torch.get_num_threads()} threads")
    with torch.inference_mode():
        result = measure(arguments.rows, arguments.cols, arguments.depth, dtype, arguments.runs)
    print(table(result, arguments.rows, arguments.cols, arguments.depth, dtype.itemsize))
    if arguments.json:
        result.write(arguments.json)


def measure(row_counts: list[int], cols: int, depth: int, dtype: torch.dtype, runs: int) -> Result:
    """Measure the milliseconds of each contestant for each number of rows. A run is one product of each, in turn."""
    result = Result()
    count = max(2, ROTATED_BYTES // (cols * depth * dtype.itemsize))
    weights = itertools.cycle([torch.randn(cols, depth).to(dtype) for _ in range(count)])
    for rows in row_counts:
        x = torch.randn(rows, depth).to(dtype)
        samples: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        for run in range(runs + 1):
            for name, product in CONTESTANTS.items():
                milliseconds = timed(product, x, next(weights))
                if run:  # the first product also wakes threads and allocates memory
                    samples[name].append(milliseconds)
        for name, taken in samples.items():
            result.add(name, f"linear_{rows}_ms", "ms", taken)
    return result


def timed(product: Product, x: Tensor, weight: Tensor) -> float:
    start = time.perf_counter()
    product(x, weight, None)
    return (time.perf_counter() - start) * 1000


def table(result: Result, row_counts: list[int], cols: int, depth: int, item_bytes: int) -> str:
    lines = [f"x [M, {depth}] @ weight [{cols}, {depth}]^T, medians"]
    lines.append("    M  torch ms  medusa ms  upcast ms   ratio    GB/s  GFLOP/s")
    for rows in row_counts:
        theirs, ours, sliced = (result.median(name, f"linear_{rows}_ms") or 0.0 for name in CONTESTANTS)
        bandwidth, speed = cols * depth * item_bytes / ours / 1e6, 2 * rows * cols * depth / ours / 1e6
        lines.append(
            f"{rows:5d} {theirs:9.2f} {ours:10.2f} {sliced:10.2f} {theirs / ours:6.1f}x {bandwidth:7.1f} {speed:8.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
