"""The benchmark of matrix products, with small numbers."""

from __future__ import annotations

import torch

from benchmarks.engine.products import measure


def test_a_product_is_measured_beside_torchs() -> None:
    with torch.inference_mode():
        row = measure(2, 64, 32, "bf16", runs=2)
    assert (row["rows"], row["columns"], row["depth"]) == (2, 64, 32)
    assert min(row[name] for name in ("ours", "own", "fp32", "ratio")) > 0
