"""The benchmark of models that run by transformers' code, with small numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")


@pytest.mark.slow
def test_both_rows_are_measured(tmp_path: Path) -> None:
    from benchmarks.engine.transformers_backend import make, measure

    result = measure(make(tmp_path, num_hidden_layers=1), batch=2, tokens=4, runs=1)
    assert len(result["ours"]["first"]) == len(result["theirs"]["rate"]) == 1
    assert result["first_ratio"] > 0
    assert result["rate_ratio"] > 0
    assert 0 < result["theirs"]["products"][0] < 1
