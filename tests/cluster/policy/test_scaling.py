"""How many instances: up at once, down one at a time, fairly where there are too few."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st
from medusa_cluster.policy.scaling import Bounds, Monitor, need, prescaled, scale_target, shares
from medusa_cluster.policy.state import Deployment, Load

BOUNDS = Bounds()


def model(name: str = "m", low: int = 0, high: int = 8, **changes: float) -> Deployment:
    return Deployment(name, name, min=low, max=high, **changes)  # type: ignore[arg-type]


class Run:
    """Follows one model over time; the instances are there at once."""

    def __init__(self, deployment: Deployment, current: int = 0) -> None:
        self.deployment, self.current, self.monitor = deployment, current, Monitor()

    def at(self, now_s: float, ready_since_s: float = -inf, **load: float) -> int:
        found = scale_target(
            self.deployment,
            Load(**load),  # type: ignore[arg-type]
            current=self.current,
            ready=self.current,
            ready_since_s=ready_since_s,
            now_s=now_s,
            monitor=self.monitor,
            bounds=BOUNDS,
        )
        self.current, self.monitor = found.count, found.monitor
        return self.current


def test_need_follows_the_tightest_of_tokens_requests_and_blocks() -> None:
    deployment = model(tokens_per_s=1000)
    assert need(deployment, Load(tokens_per_s=800), 1, 1000, BOUNDS).least == 1
    assert need(deployment, Load(tokens_per_s=801), 1, 1000, BOUNDS).least == 2
    assert need(deployment, Load(tokens_per_s=4000), 1, 1000, BOUNDS) == need(
        deployment, Load(tokens_per_s=4000, running=3), 1, 1000, BOUNDS
    )
    assert (lambda found: (found.least, found.most))(need(deployment, Load(tokens_per_s=4000), 1, 1000, BOUNDS)) == (
        5,
        8,
    )
    assert need(deployment, Load(running=17), 1, 1000, BOUNDS).least == 3
    assert need(deployment, Load(kv_use=0.97), 2, 1000, BOUNDS).least == 3
    assert need(deployment, Load(), 2, 1000, BOUNDS).most == 0


def test_a_request_brings_up_the_first_instance_and_a_burst_the_rest_at_once() -> None:
    run = Run(model())
    assert run.at(0.0) == 0
    assert run.at(0.1, waiting=1, last_request_s=0.1) == 1
    assert run.at(0.2, waiting=64, last_request_s=0.2) == 8


def test_down_goes_one_at_a_time_after_a_moment_without_need() -> None:
    run = Run(model(), current=4)
    assert run.at(0.0, running=32, last_request_s=0.0) == 4
    assert run.at(0.5, running=1, last_request_s=0.0) == 4  # 32 are in the window still
    assert run.at(1.1, running=1, last_request_s=0.0) == 4  # spare from now on
    assert run.at(1.3, running=1, last_request_s=0.0) == 4
    assert run.at(1.5, running=1, last_request_s=0.0) == 3
    assert run.at(1.6, running=1, last_request_s=0.0) == 3
    assert run.at(1.9, running=1, last_request_s=0.0) == 2
    assert run.at(2.0, running=14, last_request_s=2.0) == 2
    assert run.at(2.2, running=1, last_request_s=2.0) == 2  # the hysteresis began anew


def test_the_last_instance_stays_for_its_keep_alive() -> None:
    run = Run(model(), current=1)
    for step in range(299):
        assert run.at(step / 10, last_request_s=0.0) == 1
    for step in range(299, 310):
        run.at(step / 10, last_request_s=0.0)
    assert run.current == 0


def test_minimum_and_maximum_hold() -> None:
    run = Run(model(low=2, high=3))
    assert run.at(0.0) == 2
    assert run.at(0.1, waiting=1000, last_request_s=0.1) == 3
    for step in range(1000):
        run.at(0.1 + step / 10, last_request_s=0.1)
    assert run.current == 2


def test_what_one_instance_can_do_is_learned_while_requests_wait() -> None:
    run = Run(model(high=100), current=2)
    run.at(0.0, waiting=1, running=15, tokens_per_s=9000, prefilled_per_s=2000, longest_wait_s=2.0, last_request_s=0.0)
    assert run.monitor.tokens_per_s == 1000  # not what arrives while they cannot keep up
    assert run.at(0.1, tokens_per_s=8000, last_request_s=0.1) >= 10
    profiled = Run(model(tokens_per_s=500, high=100), current=2)
    profiled.at(0.0, waiting=1, running=15, prefilled_per_s=2000, longest_wait_s=2.0, last_request_s=0.0)
    assert profiled.at(0.1, tokens_per_s=1600, last_request_s=0.1) == 6


def test_what_instances_have_done_says_nothing_before_they_were_busy_for_as_long_as_it_is_counted() -> None:
    run = Run(model(high=100), current=2)
    for step in range(20):  # the first prompts of a burst that found idle instances
        waited, done = step / 10, 100.0 * step
        run.at(waited, waiting=8, running=8, tokens_per_s=9000, prefilled_per_s=done, longest_wait_s=waited)
        assert run.current == 2
    found = run.at(2.0, waiting=8, running=8, tokens_per_s=9000, prefilled_per_s=2000, longest_wait_s=2.0)
    assert (run.monitor.tokens_per_s, found) == (1000, 15)
    new = Run(model(high=100), current=1)  # its requests waited for its start, not for what it does
    assert new.at(9.0, ready_since_s=8.9, waiting=8, tokens_per_s=9000, prefilled_per_s=50, longest_wait_s=5.0) == 1


def test_a_full_cluster_is_shared_fairly() -> None:
    deployments = {name: model(name) for name in "abc"}
    assert shares({"a": 2, "b": 2, "c": 2}, deployments, 10) == {"a": 2, "b": 2, "c": 2}
    assert shares({"a": 8, "b": 1, "c": 8}, deployments, 9) == {"a": 4, "b": 1, "c": 4}
    heavy = {"a": model("a", weight=3), "b": model("b")}
    assert shares({"a": 8, "b": 8}, heavy, 8) == {"a": 6, "b": 2}
    reserved = {"a": model("a", low=5), "b": model("b")}
    assert shares({"a": 8, "b": 8}, reserved, 8) == {"a": 5, "b": 3}


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(st.integers(0, 9), st.integers(0, 3))), st.integers(0, 40)
)
def test_shares_use_all_slots_and_never_more(wishes: dict[str, tuple[int, int]], slots: int) -> None:
    deployments = {name: model(name, low) for name, (_, low) in wishes.items()}
    demands = {name: count for name, (count, _) in wishes.items()}
    given_ = shares(demands, deployments, slots)
    assert sum(given_.values()) == min(slots, sum(demands.values()))
    assert all(0 <= given_[name] <= demands[name] for name in demands)


def test_the_load_of_decoders_grows_with_prefill_by_what_waits() -> None:
    load = Load(waiting=60, running=20, tokens_per_s=9.0, kv_use=0.2)
    assert prescaled(load, 2, 4) == Load(running=40, kv_use=0.4)  # in step with prefill
    assert prescaled(load, 1, 8) == Load(running=80, kv_use=0.8)  # by all that waits
    assert prescaled(load, 2, 2) == prescaled(load, 2, 0) == Load(running=20, kv_use=0.2)
    assert prescaled(load, 0, 2) == Load(running=20, kv_use=0.2)
    assert prescaled(Load(waiting=9), 1, 2) == Load(running=9)
