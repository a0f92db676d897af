"""The benchmark of adapters, with small numbers."""

from __future__ import annotations

from pathlib import Path

from benchmarks.engine.adapters import measure


def test_all_rows_are_measured() -> None:
    result = measure(str(Path(__file__).parents[2] / "examples" / "pydoc-lm"), rank=4, batch=2, tokens=4, runs=1)
    assert len(result["base"]) == len(result["adapters"]) == len(result["first_fetched_ms"]) == 1
    assert result["ratio"] > 0
