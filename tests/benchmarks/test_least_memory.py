"""The benchmark of containers with little memory, with one that suffices and one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.least_memory import measure

EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc-lm"

pytestmark = [pytest.mark.slow, pytest.mark.root]


def test_a_limit_that_suffices_and_one_that_does_not() -> None:
    try:
        found = measure(EXAMPLE, [1000, 160])
    except OSError as error:
        pytest.skip(f"no control group with a memory limit can be made here: {error}")
    assert {limit: each.outcome for limit, each in found.items()} == {1000: "serves", 160: "refused"}
    assert found[1000].tokens == 512
    assert 160 << 20 > found[160].used_bytes > 50 << 20
