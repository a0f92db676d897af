"""Fetches that share a link: ParaServe's Algorithm 2."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster_model import ClusterModel, model
from hypothesis import given
from hypothesis import strategies as st
from medusa_cluster.policy.decide import Options
from medusa_cluster.policy.index import Index
from medusa_cluster.policy.placement import Placement
from medusa_cluster.policy.sizing import Fetching, newcomer_bytes_per_s
from medusa_cluster.policy.state import Copy, Deployment, Instance, Load, Node

GB = 10**9


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


def rate(*copies: Copy, deadline_s: float, full: bool = True) -> float:
    """The bandwidth for one more fetch on a node whose 1 GB/s these copies of a model of 16 layers and 16 GB share."""
    worker = Instance("a-0", "a", "n", "ready", layers=(4, 8), group="g", full=full)
    node = Node("n", link_bytes_per_s=GB, devices=4, copies=copies, instances=(worker,))
    shared = Deployment("a", "s3://a", size_bytes=16 * GB, layers=16)
    index = Index()
    index.update({"n": node})
    deadlines = {("n", "s3://a"): deadline_s}
    return Placement({"n": node}, index, {"s3://a": shared}, {"a": shared}, 1, 20.0, deadlines).bytes_per_s("n")


def test_a_worker_of_a_group_has_to_be_in_time_with_its_own_layers_alone() -> None:
    half = Copy("s3://a", 16 * GB, 2 * GB, layers=(4, 8))
    assert rate(half, deadline_s=24.0) == GB / 2  # 2 GB at half of the link
    assert rate(half, deadline_s=23.9) == 0
    there = Copy("s3://a", 16 * GB, 4 * GB, layers=(4, 8))
    assert rate(there, deadline_s=10.0) == GB / 2  # the other layers come behind it
    assert rate(there, deadline_s=10.0, full=False) == GB  # and here they do not
    assert rate(replace(there, layers=None), deadline_s=10.0) == 0


def test_a_fetch_counts_before_its_node_says_how_large_it_is() -> None:
    assert rate(Copy("s3://a", 0, 0), deadline_s=52.0) == GB / 2
    assert rate(Copy("s3://a", 0, 0), deadline_s=51.9) == 0


def test_time_for_which_a_request_has_waited_is_missing_for_the_weights() -> None:
    for waited_s in (0.0, 3.0):
        node = Node("n", link_bytes_per_s=GB, memory_bytes=500 * GB)
        cluster = ClusterModel([node], [model("a", GB, ttft_slo_s=12.0)], Options(pool=False))
        cluster.loads["a"] = Load(waiting=1, longest_wait_s=waited_s, last_request_s=0.0)
        cluster.tick()
        assert cluster.memory.deadlines_s["n", "s3://a"] == 12.0 - waited_s
