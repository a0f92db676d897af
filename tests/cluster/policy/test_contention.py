"""Fetches that share a link: ParaServe's Algorithm 2."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from medusa_cluster.policy.contention import Fetching, newcomer_bytes_per_s, settle


def test_a_newcomer_gets_an_equal_share() -> None:
    assert newcomer_bytes_per_s(100, [], 0) == 100
    assert newcomer_bytes_per_s(100, [Fetching("a", 100, 10)], 0) == 50


def test_nobody_is_let_in_where_another_would_be_late() -> None:
    assert newcomer_bytes_per_s(100, [Fetching("a", 500, 10)], 0) == 50  # exactly in time
    assert newcomer_bytes_per_s(100, [Fetching("a", 501, 10)], 0) == 0
    assert newcomer_bytes_per_s(100, [Fetching("a", 1, 10)], 11) == 0  # it is late already


def test_pending_bytes_shrink_by_equal_shares_and_what_is_done_leaves() -> None:
    going = [Fetching("a", 100, 10), Fetching("b", 500, 10)]
    assert settle(100, going, since_s=0, now_s=1) == (Fetching("a", 50, 10), Fetching("b", 450, 10))
    assert settle(100, going, since_s=0, now_s=2) == (Fetching("b", 400, 10),)
    assert settle(100, [], 0, 5) == ()


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
        end = now + first.pending_bytes * len(going) / link
        assert end <= first.deadline_s * 1.001
        left = {fetch.name for fetch in going if fetch.name != first.name}
        going = tuple(fetch for fetch in settle(link, going, now, end) if fetch.name in left)
        now = end
    assert now == pytest.approx(now)
