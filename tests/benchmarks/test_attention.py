"""The benchmark of attention, with small numbers."""

from __future__ import annotations

import pytest
import torch

from benchmarks.engine.attention import _contiguous, _paged, measure


@pytest.mark.parametrize("heads", [2, 4])
def test_attention_is_measured_beside_torchs(heads: int) -> None:
    q, k, v = torch.randn(20, heads, 32), torch.randn(20, 2, 32), torch.randn(20, 2, 32)
    with torch.inference_mode():
        row = measure(20, heads, 2, 32, dtype="bf16", runs=2)
        torch.testing.assert_close(_paged(q, k, v)().transpose(0, 1)[None], _contiguous(q, k, v)(), rtol=0, atol=1e-5)
    assert (row["tokens"], row["heads"], row["head_dim"]) == (20, heads, 32)
    assert min(row[name] for name in ("ours", "own", "fp32", "ratio")) > 0
