"""Live scaling: which new instances relieve which loaded ones, and whether an SLO needs that."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from cluster_model import MB, ClusterModel, model, nodes, of
from hypothesis import given
from hypothesis import strategies as st
from medusa_cluster.policy.chains import plan
from medusa_cluster.policy.decide import Options
from medusa_cluster.policy.live import live_pairs, longest_wait_s
from medusa_cluster.policy.state import Load, Node, StartInstance
from medusa_runtime.state.stage_times import StageTimes

# Weights of 100 MB take 2 s over the model's links of 50 MB/s, and an instance prefills 1000 tokens a second.
TIMES = StageTimes(0.0, 0.0, 0.0, 0.1, 0.01, 100 * MB, float("inf"), 0.0, 1)


def test_the_ends_of_chains_are_paired_with_the_most_loaded() -> None:
    sources = [Node(name, link_bytes_per_s=rate) for name, rate in (("s1", 50), ("s2", 100))]
    chains = plan(sources, [Node("a", link_bytes_per_s=100), Node("b", link_bytes_per_s=50)])
    targets = chains[0].targets
    assert live_pairs(chains, ["hot", "warm"], {name: [name] for name in targets}) == {targets[-1]: "hot"}
    assert live_pairs(chains, ["hot", "warm"], {targets[0]: ["i"]}) == {"i": "hot"}
    assert live_pairs(chains, ["hot", "warm"], {}) == {}


def test_each_that_starts_relieves_another_one_also_on_the_same_node() -> None:
    chains = plan(nodes(2), [Node("a", link_bytes_per_s=100), Node("b", link_bytes_per_s=50)])
    assert [chain.targets for chain in chains] == [("a",), ("b",)]
    starting = {"a": ["a0", "a1", "a2"], "b": ["b0"]}
    assert live_pairs(chains, ["l0", "l1", "l2"], starting) == {"a0": "l0", "b0": "l1", "a1": "l2"}

    cluster = ClusterModel(nodes(2, devices=3), [model(min=2, concurrency=8)], Options(live=True))
    cluster.run(40, 0.5)
    loaded = {one.id for one in cluster.instances("m")}
    cluster.load("m", waiting=30, running=16)
    starts = of(StartInstance, cluster.tick())
    assert len(starts) > len({start.node for start in starts})
    partners = [start.partner for start in starts if start.partner is not None]
    assert sorted(partners) == sorted(loaded & set(partners)) != []


def partners(load: Load, *, options: Options | None = None, more: tuple[int, int] = (0, 0), **changes: object) -> bool:
    """Return whether instances that a load starts are to relieve one that there is.

    ``more``: requests of the first and of the second instance that there are.
    """
    given = {"min": 2, "times": TIMES, "ttft_slo_s": 2.5, "tokens_per_s": 1000.0, "concurrency": 100}
    cluster = ClusterModel(nodes(3), [model(**{**given, **changes})], options or Options(live=True))
    cluster.run(40, 0.5)
    for node, running in zip(sorted(name for name, one in cluster.nodes.items() if one.instances), more, strict=True):
        (instance,) = cluster.nodes[node].instances
        cluster.nodes[node] = replace(cluster.nodes[node], instances=(replace(instance, running=running),))
    cluster.loads["m"] = replace(load, last_request_s=cluster.now_s)
    starts = of(StartInstance, cluster.tick())
    assert starts
    return any(start.partner is not None for start in starts)


def test_no_pair_is_made_if_the_others_serve_the_load_in_time_until_the_weights_are_there() -> None:
    assert not partners(Load(tokens_per_s=1700))  # an instance more, because two have little in reserve
    assert not partners(Load(tokens_per_s=2400))  # up to 2000 tokens wait after the 2 s, for three instances
    assert partners(Load(tokens_per_s=2400), ttft_slo_s=1.0)
    assert partners(Load(tokens_per_s=2400, unanswered_tokens=6000))
    assert partners(Load(tokens_per_s=2400, longest_wait_s=1.7))  # with the prefill it may be late
    assert partners(Load(tokens_per_s=2400), ttft_slo_s=0.3)
    assert partners(Load(tokens_per_s=2400), size=900 * MB, times=replace(TIMES, weights_bytes=900 * MB))


def test_the_most_loaded_instance_counts() -> None:
    load = Load(tokens_per_s=1700, unanswered_tokens=2000)
    assert not partners(load, more=(4, 4))
    assert partners(load, more=(7, 1))


def test_a_pair_is_made_if_too_little_is_known() -> None:
    load = Load(running=250)
    assert partners(load, tokens_per_s=0.0)
    assert not partners(load)
    assert partners(load, ttft_slo_s=float("inf"))
    assert not partners(load, times=None)  # the weights' size is known
    assert not partners(load, options=Options())


def test_weights_from_devices_take_as_long_as_the_devices_that_have_them_need() -> None:
    for alone in (True, False):
        deployed = [model(min=1, times=TIMES, ttft_slo_s=4.0, tokens_per_s=1000.0, concurrency=100)]
        cluster = ClusterModel(nodes(2, devices=4), deployed, Options(live=True, from_devices=True, pool=False))
        cluster.run(6)
        (node,) = (name for name, one in cluster.nodes.items() if one.instances)
        (one,) = cluster.nodes[node].instances
        others = tuple(replace(one, id=f"i{number}", model="other" if alone else "m") for number in range(3))
        cluster.nodes[node] = replace(cluster.nodes[node], instances=(one, *others))  # so the next one starts elsewhere
        cluster.loads["m"] = Load(tokens_per_s=1900 if alone else 7600, last_request_s=cluster.now_s)
        starts = of(StartInstance, cluster.tick())
        assert any(start.partner is not None for start in starts) == alone  # 8 s by one of four cards, or 2 s


@given(st.integers(0, 40), st.integers(0, 12), st.integers(1, 10), st.integers(0, 6), st.integers(1, 20))
def test_the_longest_wait_is_that_of_a_queue(waiting: int, arriving: int, rate: int, more: int, steps: int) -> None:
    """Serve single tokens in small steps, and compare with the formula."""
    fine = 20
    queue: deque[int] = deque([0] * (waiting * fine))
    longest, step = 0, 0
    while step < steps * fine or queue:
        if step < steps * fine:
            queue.extend([step] * arriving)
        for _ in range(rate if step < steps * fine else rate + more):
            if queue:
                longest = max(longest, step - queue.popleft())
        step += 1
    load = Load(unanswered_tokens=waiting, tokens_per_s=arriving)
    found = longest_wait_s(load, rate, rate + more, steps)
    assert found == pytest.approx(longest / fine, abs=(3 + arriving / rate) / fine)
