"""ZigZag scheduling: the paper's example, the integer program, and the queue that does without."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from medusa_cluster.group.live.layer_queue import BestEffort, WholePrompts, ZigZag

from benchmarks.pipeline.zigzag import Scaling, best_effort, schedule

from .integer_program import alone, is_feasible, solve

PAPER = Scaling.equal(7, 6, 8)  # BlitzScale Figure 15: 7 layers, one arrives while 6 are executed


def test_the_papers_example_without_an_integer_program() -> None:
    found = schedule(PAPER)
    assert found.on_target == (1, 2, 2, 3, 4, 4, 5, 5)
    assert found.finish == (7, 12, 17, 21, 24, 27, 29, 31)
    assert found.mean == 21.0
    assert found.finish[2] == 17  # request 3: 12 for the two before it and 5 for its own
    assert (best_effort(PAPER).finish[5] - 5, found.finish[5] - 5) == (32, 22)  # request 6, from its start at 5


def test_the_papers_example_by_the_integer_program() -> None:
    pytest.importorskip("scipy")
    found = solve(PAPER).schedule
    assert found.mean == 21.0
    assert is_feasible(PAPER, found.on_target)


def test_the_integer_program_of_a_real_model() -> None:
    pytest.importorskip("scipy")
    scaling = Scaling.equal(32, 6, 8)
    found = solve(scaling, time_limit_s=60.0)
    assert (found.schedule.mean, found.gap) == (schedule(scaling).mean, 0.0)


def test_an_integer_program_that_is_cut_short_says_so() -> None:
    pytest.importorskip("scipy")
    scaling = Scaling.equal(40, 4, 12)
    found = solve(scaling, time_limit_s=0.01)
    assert found.schedule.finish == schedule(scaling).finish
    assert 0.0 < found.gap <= 1.0


def test_the_papers_example_by_best_effort_and_alone() -> None:
    found = best_effort(PAPER)
    assert found.on_target == (1, 1, 1, 1, 1, 1, 2, 2)
    assert found.finish == (7, 13, 19, 25, 31, 37, 42, 47)
    assert found.mean == 27.625
    assert alone(PAPER).finish == (7, 14, 21, 28, 35, 42, 49, 56)
    assert alone(PAPER).mean == 31.5


@pytest.mark.parametrize(
    ("layers", "load", "on_target", "finish"),
    [
        (4, 2, (1, 2, 3, 1), (4, 6, 7, 10)),
        (8, 3, (1, 3, 5, 6, 3, 5), (8, 13, 16, 18, 23, 26)),
        (4, 3, (1, 2, 2, 3, 1), (4, 6, 8, 9, 12)),
    ],
)
def test_other_sizes(layers: int, load: int, on_target: tuple[int, ...], finish: tuple[int, ...]) -> None:
    found = schedule(Scaling.equal(layers, load, len(finish)))
    assert (found.on_target, found.finish) == (on_target, finish)


def test_best_effort_of_a_small_model() -> None:
    assert best_effort(Scaling.equal(4, 2, 4)).finish == (4, 7, 9, 11)


def test_a_source_that_may_take_an_untouched_batch() -> None:
    assert schedule(Scaling.equal(4, 2, 4), take_untouched=True).finish == (4, 6, 7, 9)


def test_nothing_waits_and_one_layer() -> None:
    assert schedule(Scaling.equal(4, 2, 0)).finish == ()
    assert schedule(Scaling.equal(1, 5, 3)).finish == (1, 2, 3)
    assert solve(Scaling.equal(1, 5, 0)).schedule.finish == ()


def test_the_queue_gives_the_head_only_and_never_one_that_runs() -> None:
    queue = ZigZag(3, untouched=False)
    assert [queue.add(), queue.add()] == [0, 1]
    assert queue.next(loaded=1) == 0
    assert queue.pull(3) is None  # nothing is done of it yet
    queue.layer_done(0)
    assert queue.next(loaded=1) == 1  # the head waits for its second layer
    assert queue.pull(3, busy=0) is None
    assert queue.pull(3, busy=1) == 0
    assert queue.pull(3) is None
    queue.layer_done(1)
    assert queue.pull(3) == 1
    assert queue.pull(3) is None


@pytest.mark.parametrize("kind", [ZigZag, WholePrompts, BestEffort])
def test_a_queue_forgets_what_it_has_handed_over(kind: type[ZigZag]) -> None:
    """An instance that prefills for others may get batches for weeks."""
    queue = kind(2)
    tracemalloc.start()
    try:
        for number in range(20_000):
            assert queue.add() == number
            while (batch := queue.next(loaded=2)) is not None:
                queue.layer_done(batch)
            assert queue.pull(2) == number
            if number == 1000:
                before = tracemalloc.get_traced_memory()[0]
        assert tracemalloc.get_traced_memory()[0] < before + 10_000
    finally:
        tracemalloc.stop()
    assert not queue


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 9), st.integers(0, 7), st.integers(1, 6))
def test_the_queue_is_within_5_percent_of_the_integer_program(layers: int, load: int, batches: int) -> None:
    pytest.importorskip("scipy")
    scaling = Scaling.equal(layers, load, batches)
    best, queued = solve(scaling).schedule, schedule(scaling)
    assert best.mean <= queued.mean + 1e-9
    assert queued.mean <= 1.05 * best.mean
    assert is_feasible(scaling, best.on_target)


@given(st.integers(1, 12), st.integers(0, 9), st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_zigzag_is_never_worse_than_the_source_alone(layers: int, load: int, weights: list[int]) -> None:
    scaling = Scaling(layers, load, tuple(weights))
    found = schedule(scaling)
    assert all(1 <= taken <= layers for taken in found.on_target)
    assert list(found.finish) == sorted(found.finish)
    before = alone(scaling)
    if layers > 1 and len(set(weights)) == 1:
        assert all(found.finish[i] <= before.finish[i] for i in range(len(weights)))
    assert found.mean <= before.mean + max(weights)  # a short batch may wait for a layer of a long one
