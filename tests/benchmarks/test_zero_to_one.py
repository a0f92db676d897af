"""What a cluster adds to a start, once, on a laboratory of one node."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cluster.options import Options
from benchmarks.cluster.zero_to_one import rows

EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc-lm"


@pytest.mark.cluster
@pytest.mark.root
@pytest.mark.slow
def test_both_ways_answer_the_same_and_are_timed() -> None:
    found = {row["metric"]: row for row in rows(Options(EXAMPLE, ("zero_to_one",), runs=1))}
    assert list(found) == ["added_ms", "ttft_ms", "alone_ttft_ms", "before_exec_ms", "after_token_ms"]
    assert found["after_token_ms"]["median"] > 0
    assert all(row["runs"] == 1 for row in found.values())
