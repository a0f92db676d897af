"""The longest gaps between the tokens of an answer: where they are, and what is said of them."""

from __future__ import annotations

import pytest
from medusa_runtime.timeline import Stage

from benchmarks.gpu.gaps import longest, median_ms

TIMES = [1.0, 1.1, 2.6, 2.62, 2.65, 2.66]


def test_the_longest_gaps_have_their_stages() -> None:
    stages = [
        Stage("load", "worker 0 engine", 0, 1_090_000_000, {}),
        Stage("consolidated", "worker 0 engine", 2_500_000_000, 2_500_000_000, {}),
        Stage("decode_kernels", "worker 1 engine", 1_000_000_000, 2_100_000_000, {}),
    ]
    first, second, third = longest(TIMES, stages)
    assert [first["token"], second["token"], third["token"]] == [2, 1, 4]
    assert first["ms"] == pytest.approx(1500)
    kernels, mark = first["stages"]
    assert kernels == ["worker 1 engine decode_kernels", pytest.approx(-100), pytest.approx(1000)]
    assert mark == ["worker 0 engine consolidated", pytest.approx(1400), pytest.approx(1400)]
    assert [name for name, _, _ in second["stages"]] == ["worker 1 engine decode_kernels", "worker 0 engine load"]
    assert third["stages"] == []


def test_a_median_is_of_the_gaps_in_its_time() -> None:
    assert median_ms(TIMES) == pytest.approx(30)
    assert median_ms(TIMES, until=2.6) == pytest.approx(1500)
    assert median_ms(TIMES, since=2.61) == pytest.approx(30)
    assert median_ms(TIMES, since=5.0) is None
