"""Scores of texts by an encoder's vectors."""

from __future__ import annotations

import tracemalloc
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from medusa_handler.openai import ranking
from medusa_handler.openai.embeddings import usage
from medusa_runtime.engine.base import Embedding

WIDTH = 1024


@pytest.mark.parametrize("queries", [1, 256])
def test_vectors_are_numbers_one_at_a_time(monkeypatch: pytest.MonkeyPatch, queries: int) -> None:
    """2048 pairs of vectors of 4096 numbers took 600 MB at once."""
    found = [Embedding(1, array("f", [float(number % 3), *[1.0] * (WIDTH - 1)]).tobytes()) for number in range(512)]
    monkeypatch.setattr(ranking, "embeddings", lambda model, texts, *_, **options: found[: len(texts)])
    info = SimpleNamespace(architecture="encoder", max_model_len=8)
    service: Any = SimpleNamespace(model=SimpleNamespace(wait_info=lambda is_disconnected: info))
    tracemalloc.start()
    try:
        scores, vectors = ranking._fits(service, {}, ["a"] * queries, ["b"] * 256, lambda: False, field="documents")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 * 2 * WIDTH * 4, "of two vectors"
    assert usage(vectors)["total_tokens"] == queries + 256
    same = [scores[number] == pytest.approx(1.0) for number in range(256)]
    assert same == [(number if queries > 1 else 0) % 3 == (queries + number) % 3 for number in range(256)]
