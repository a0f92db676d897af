"""The benchmark of vLLM's own routes, as its command runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.vllm_layer import measure

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc-lm"


def test_a_first_and_a_later_request_are_measured() -> None:
    ((first, later),) = measure("cold", str(EXAMPLE), 1)
    assert 0 < later < first
