"""How many workers start a model: ParaServe's Algorithm 1, with its slips corrected."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from medusa_cluster.policy.sizing import CandidateNode, Goal, Scheme, choose, parts, predict
from medusa_runtime.state.stage_times import StageTimes

GB = 10**9
TIMES = StageTimes(0.2, 0.1, 1.0, 0.5, 0.05, 8 * GB, math.inf, 0.0, 1)


def servers(*rates: float, free: float = math.inf) -> list[CandidateNode]:
    return [CandidateNode(f"n{number}", rate * GB, free_bytes=free) for number, rate in enumerate(rates)]


def test_one_worker_where_that_is_fast_enough() -> None:
    assert choose(servers(1, 2, 1), TIMES, Goal(5.0, 1.0)) == Scheme(("n1",), 1, pytest.approx(4.5), 0.05, True)  # type: ignore[arg-type]


def test_as_many_workers_as_the_first_token_needs() -> None:
    sizes = {slo: choose(servers(2, 2, 2, 2, 2), TIMES, Goal(slo, 1.0)) for slo in (4.5, 2.6, 1.9, 1.7)}
    assert {slo: scheme and scheme.size for slo, scheme in sizes.items()} == {4.5: 1, 2.6: 2, 1.9: 3, 1.7: 1}
    slowest = sizes[1.7]
    assert slowest is not None
    assert not slowest.meets  # more workers are bound by the import: nothing meets it, so one, and it is said


def test_full_memory_workers_where_computing_follows_memory() -> None:
    goal = Goal(3.2, 1.0, follows_memory=True)
    found = choose(servers(2, 2, 2, 2), TIMES, goal)
    assert found is not None
    assert (found.size, found.full, found.meets) == (2, 1, True)  # 2 + 0.5·(1 + 1/2)
    tight = choose(servers(2, 2, 2, 2), TIMES, Goal(2.5, 1.0, follows_memory=True))
    assert tight is not None
    assert (tight.size, tight.full, tight.ttft_s) == (2, 2, pytest.approx(2.5))
    slow_tokens = choose(servers(2, 2, 2, 2), TIMES, Goal(3.2, 0.07, follows_memory=True))
    assert slow_tokens is not None
    assert (slow_tokens.full, slow_tokens.tpot_s) == (2, 0.05)


def test_a_small_server_takes_a_part_and_none_is_in_a_group_twice() -> None:
    large, small = CandidateNode("large", 2 * GB), CandidateNode("small", 4 * GB, free_bytes=4 * GB)
    found = choose([large, small], TIMES, Goal(3.0, 1.0))
    assert found is not None
    assert found.nodes == ("large", "small")
    assert choose([small], TIMES, Goal(3.0, 1.0)) is None
    alone = choose([large], TIMES, Goal(3.0, 1.0))
    assert alone is not None
    assert (alone.nodes, alone.meets) == (("large",), False)


def test_busy_links_and_layers_bound_the_group() -> None:
    assert choose([CandidateNode("full", 0.0)], TIMES, Goal(9, 9)) is None
    found = choose(servers(2, 2, 2, 2), TIMES, Goal(1.9, 1.0), layers=2)
    assert found is not None
    assert found.size == 1


def test_hops_count_for_groups_only() -> None:
    goal = Goal(math.inf, math.inf, waiting_s=0.3, hop_s=0.01)
    one, four = (predict(servers(*[2.0] * size), size, TIMES, goal) for size in (1, 4))
    assert (one.ttft_s, one.tpot_s) == (pytest.approx(0.3 + 4.5), 0.05)
    assert (four.ttft_s, four.tpot_s) == (pytest.approx(0.3 + 1.3 + 0.5 + 0.04), pytest.approx(0.09))


def test_layers_are_divided_evenly() -> None:
    assert parts(10, 4) == ((0, 3), (3, 6), (6, 8), (8, 10))
    assert parts(3, 3) == ((0, 1), (1, 2), (2, 3))


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(1, 20)), min_size=1, max_size=7), st.floats(0.5, 20), st.booleans()
)
def test_what_is_chosen_fits_and_nothing_smaller_meets_the_goal(
    made: list[tuple[float, float]], slo: float, follows: bool
) -> None:
    available = [CandidateNode(f"n{i}", b * GB, free_bytes=free * GB) for i, (b, free) in enumerate(made)]
    goal = Goal(slo, 0.12, follows_memory=follows)
    found = choose(available, TIMES, goal)
    named = {server.node: server for server in available}
    if found is None:
        assert all(server.free_bytes < 8 * GB for server in available)
        return
    assert len(set(found.nodes)) == found.size
    for number, name in enumerate(found.nodes):
        assert named[name].free_bytes >= (8 * GB if number < found.full else 8 * GB / found.size)
    for server in available:
        if server.free_bytes >= 8 * GB and predict([server], 1, TIMES, goal).meets:
            assert found.size == 1
