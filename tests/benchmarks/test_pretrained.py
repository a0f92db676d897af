"""The benchmark of transformers' models for other tasks, with small numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["entities", "translation"])
def test_both_ways_have_the_same_result(tmp_path: Path, task: str) -> None:
    from benchmarks.engine.pretrained import TINY, measure

    found = measure(task, tmp_path, 1, **TINY[task])
    assert all(len(found[way][what]) == 1 for way in ("theirs", "ours") for what in ("result", "cpu"))
    assert found["ours"]["cpu"][0] > 0
