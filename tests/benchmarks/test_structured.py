"""The benchmark of structured outputs, with small numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("llguidance", reason="structured outputs need llguidance")


def test_both_rows_are_measured() -> None:
    from benchmarks.engine.structured import measure

    result = measure(str(Path(__file__).parents[2] / "examples" / "pydoc-lm"), batch=2, tokens=12, runs=1)
    assert len(result["free"]) == len(result["structured"]) == 1
    assert result["ratio"] > 0
