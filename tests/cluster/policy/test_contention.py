"""Fetches that share a link: ParaServe's Algorithm 2."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from medusa_cluster.policy.contention import Fetching, newcomer_bytes_per_s


def test_a_newcomer_gets_an_equal_share() -> None:
    assert newcomer_bytes_per_s(100, [], 0) == 100
    assert newcomer_bytes_per_s(100, [Fetching("a", 100, 10)], 0) == 50


def test_nobody_is_let_in_where_another_would_be_late() -> None:
    assert newcomer_bytes_per_s(100, [Fetching("a", 500, 10)], 0) == 50  # exactly in time
    assert newcomer_bytes_per_s(100, [Fetching("a", 501, 10)], 0) == 0
    assert newcomer_bytes_per_s(100, [Fetching("a", 1, 10)], 11) == 0  # it is late already


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=5), st.floats(1, 1e3))
def test_whoever_was_let_in_in_time_finishes_in_time(sizes: list[float], link: float) -> None:
    """All that are accepted by Eq. 3 meet the deadline that they were given, as shares only grow when one leaves."""
    going: tuple[Fetching, ...] = ()
    for number, size in enumerate(sizes):
        share = newcomer_bytes_per_s(link, going, 0)
        if share:
            going = (*going, Fetching(str(number), size, size / share * 1.0001))
    now = 0.0
    while going:
        first = min(going, key=lambda fetch: fetch.pending_bytes)
        moved = first.pending_bytes
        end = now + moved * len(going) / link
        assert end <= first.deadline_s * 1.001
        going = tuple(
            replace(fetch, pending_bytes=fetch.pending_bytes - moved) for fetch in going if fetch.name != first.name
        )
        now = end
    assert now == pytest.approx(now)
