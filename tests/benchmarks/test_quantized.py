"""The benchmark of quantized checkpoints, with small numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_fixtures import write_checkpoint

from benchmarks.engine.quantized import measure


@pytest.mark.slow
def test_every_form_is_measured(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, hidden_size=128, intermediate_size=256)
    result = measure(model, ["int8", "awq"], 100.0, batch=2, tokens=4, runs=1)
    assert list(result) == ["unquantized", "int8", "awq"]
    assert result["awq"]["mb"] < result["int8"]["mb"] < result["unquantized"]["mb"]
    assert all(row[column][0] > 0 for row in result.values() for column in ("first", "one", "batch"))
