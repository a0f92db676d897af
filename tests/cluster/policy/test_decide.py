"""Ticks of a cluster: pool, scaling, chains, deaths, drains, versions and groups together."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest
from cluster_model import MB, ClusterModel, model, nodes, of
from hypothesis import given, settings
from hypothesis import strategies as st
from medusa_cluster.policy.decide import Memory, Options, decide
from medusa_cluster.policy.scaling import Bounds
from medusa_cluster.policy.state import (
    ClusterState,
    Consolidate,
    Drop,
    Fetch,
    Load,
    Node,
    Pace,
    RequestNodes,
    ResumeInstance,
    StartInstance,
    StopInstance,
)
from medusa_runtime.state.stage_times import StageTimes

TIMES = StageTimes(0.05, 0.0, 0.1, 0.1, 0.01, 100 * MB, math.inf, 0.0, 1)


def test_a_deployed_model_comes_into_the_pool_and_starts_where_it_is() -> None:
    cluster = ClusterModel(nodes(3), [model()])
    assert cluster.tick() == [Fetch("n0", "s3://m", (), True, reason="the parameter pool lacks it")]
    cluster.run(3)
    assert cluster.copies("s3://m") == ["n0"]
    assert cluster.tick() == []
    cluster.load("m", waiting=1)
    (start,) = cluster.tick()
    assert (start.node, start.model) == ("n0", "m")


def test_a_model_without_room_comes_into_the_pool_when_there_is_room() -> None:
    cluster = ClusterModel(nodes(1, memory=150 * MB), [model("a"), model("b")])
    cluster.run(5)
    (held,) = cluster.nodes["n0"].copies
    waiting = "b" if held.url == "s3://a" else "a"
    assert cluster.run(1) == []
    cluster.nodes["n0"] = replace(cluster.nodes["n0"], memory_bytes=250 * MB)
    assert [fetch.url for fetch in of(Fetch, cluster.run(1))] == [f"s3://{waiting}"]
    cluster = ClusterModel([replace(node, memory_used_bytes=100 * MB) for node in nodes(1, memory=150 * MB)], [model()])
    assert cluster.run(1) == []
    cluster.nodes["n0"] = replace(cluster.nodes["n0"], memory_used_bytes=0)  # of something that is no copy
    assert [fetch.url for fetch in of(Fetch, cluster.tick())] == ["s3://m"]


def test_a_request_before_the_weights_starts_where_they_will_be() -> None:
    cluster = ClusterModel(nodes(3), [model()])
    cluster.load("m", waiting=1)
    decisions = cluster.tick()
    assert [type(decision) for decision in decisions] == [Fetch, StartInstance]
    assert decisions[0].node == decisions[1].node


def test_a_burst_brings_all_instances_by_one_chain_and_they_go_one_by_one() -> None:
    cluster = ClusterModel(nodes(8), [model()])
    cluster.load("m", waiting=1)
    cluster.run(4)
    cluster.load("m", waiting=64)
    decisions = cluster.tick()
    assert len(of(StartInstance, decisions)) == 7
    fetches = {fetch.node: fetch.sources for fetch in of(Fetch, decisions)}
    assert len({sources[0] for sources in fetches.values()}) == 7  # one chain: nobody sends to two
    assert len({sources[-1] for sources in fetches.values()}) == 1
    cluster.run(5)
    assert len(cluster.instances("m")) == 8
    assert cluster.store_bytes == 100 * MB  # sent once
    cluster.load("m")
    counts = []
    for _ in range(60):
        cluster.tick()
        counts.append(len(cluster.instances("m")))
    assert counts[-1] == 1  # the keep-alive
    assert all(before - after <= 1 for before, after in pairwise(counts))
    cluster.run(32)
    assert cluster.instances("m") == []
    assert cluster.copies("s3://m")


def test_a_newcomer_joins_the_end_of_a_chain_that_runs() -> None:
    cluster = ClusterModel(nodes(4), [model(min=2)])
    cluster.tick()
    fetching = {name: node.copy("s3://m") for name, node in cluster.nodes.items() if node.copy("s3://m")}
    assert len(fetching) == 2
    tail = next(name for name in fetching if not any(name in c.sources[:1] for c in fetching.values() if c))
    cluster.run(0.5)
    cluster.deployments["m"] = model(min=3)
    (fetch,) = of(Fetch, cluster.tick())
    assert fetch.sources[0] == tail
    assert set(fetch.sources) == set(fetching)
    cluster.run(4)
    assert cluster.store_bytes == 100 * MB


def test_a_relay_that_dies_costs_its_hop_only() -> None:
    cluster = ClusterModel(nodes(4), [model(min=4)])
    cluster.tick()
    by_length = sorted(
        (node.copy("s3://m") for node in cluster.nodes.values()), key=lambda c: len(c.sources) if c else 9
    )  # type: ignore[arg-type]
    first, second, third, _ = (c.sources for c in by_length if c)
    assert (len(first), len(second), len(third)) == (0, 1, 2)
    cluster.run(1)
    middle = third[0]
    cluster.kill(middle)
    repaired = of(Fetch, cluster.tick())
    assert {fetch.sources for fetch in repaired} == {
        third[1:],
        (next(f.node for f in repaired if f.sources == third[1:]), *third[1:]),
    }
    cluster.run(4)
    assert len(cluster.copies("s3://m")) == 3
    assert cluster.store_bytes == 100 * MB


def test_the_pool_and_the_instances_of_a_dead_node_come_back_elsewhere() -> None:
    cluster = ClusterModel(nodes(3), [model(min=1)])
    cluster.run(3)
    (instance,) = cluster.instances("m")
    cluster.kill(instance.node)
    decisions = cluster.tick()
    assert {type(decision) for decision in decisions} == {Fetch, StartInstance}
    cluster.run(3)
    assert len(cluster.instances("m")) == 1
    assert len(cluster.copies("s3://m")) == 1


def test_a_node_that_drains_gives_up_copies_and_instances_once_others_have_them() -> None:
    cluster = ClusterModel(nodes(2), [model(min=1)])
    cluster.run(3)
    (instance,) = cluster.instances("m")
    cluster.nodes[instance.node] = replace(cluster.nodes[instance.node], state="draining")
    decisions = cluster.tick()
    (fetch,) = of(Fetch, decisions)
    assert fetch.sources == (instance.node,)  # it goes on sending
    assert of(StopInstance, decisions) == []
    decisions = cluster.run(4)
    assert [stop.id for stop in of(StopInstance, decisions)] == [instance.id]
    assert len(cluster.instances("m")) == 1


def test_a_new_version_is_fetched_anew_and_the_old_one_goes() -> None:
    cluster = ClusterModel(nodes(1), [model(version="1")])
    cluster.run(3)
    cluster.deployments["m"] = model(version="2")
    decisions = cluster.run(4)
    assert [drop.url for drop in of(Drop, decisions)] == ["s3://m"]
    assert cluster.nodes["n0"].copy("s3://m").version == "2"  # type: ignore[union-attr]
    assert cluster.store_bytes == 200 * MB


def test_instances_of_an_older_version_are_replaced_one_at_a_time_and_the_new_one_is_there_first() -> None:
    cluster = ClusterModel(nodes(3), [model(version="1", min=2)])
    cluster.run(6)
    assert [instance.version for instance in cluster.instances("m")] == ["1", "1"]
    # An agent has seen that the object in the store is another.
    cluster.deployments["m"] = model(version="2", min=2)
    for _ in range(200):
        cluster.tick()
        assert len(cluster.instances("m")) >= 2
    assert [instance.version for instance in cluster.instances("m")] == ["2", "2"]
    assert cluster.run(5) == []


def test_in_a_full_cluster_an_instance_of_an_older_version_makes_room() -> None:
    cluster = ClusterModel(nodes(2), [model(version="1", min=2)])
    cluster.run(6)
    cluster.deployments["m"] = model(version="2", min=2)
    fewest = 2
    for _ in range(300):
        cluster.tick()
        fewest = min(fewest, len(cluster.instances("m")))
    assert fewest == 1
    assert [instance.version for instance in cluster.instances("m")] == ["2", "2"]


def test_a_full_cluster_is_shared_and_says_how_many_nodes_are_missing() -> None:
    cluster = ClusterModel(nodes(2, devices=2), [model("a"), model("b")])
    cluster.load("a", waiting=32)
    decisions = cluster.run(3)
    assert len(cluster.instances("a")) == 4
    assert of(RequestNodes, decisions) == []  # they are enough
    cluster.load("a", running=32)
    cluster.load("b", waiting=32)
    decisions = cluster.run(10)
    assert (len(cluster.instances("a")), len(cluster.instances("b"))) == (2, 2)
    assert of(RequestNodes, decisions) == [RequestNodes(4)]  # two more
    cluster.load("a")
    cluster.load("b")
    assert of(RequestNodes, cluster.run(3)) == [RequestNodes(0)]


def test_models_that_are_removed_end() -> None:
    cluster = ClusterModel(nodes(1), [model(min=1)])
    cluster.run(3)
    del cluster.deployments["m"]
    cluster.run(0.3)
    assert cluster.instances("m") == []
    assert not any(copy.pinned for copy in cluster.nodes["n0"].copies)


def test_memory_is_made_for_a_model_that_is_needed() -> None:
    cluster = ClusterModel(nodes(1, memory=150 * MB), [model("a")])
    cluster.run(3)
    del cluster.deployments["a"]
    cluster.tick()
    cluster.deployments["b"] = model("b")
    decisions = cluster.tick()
    assert [type(decision) for decision in decisions] == [Drop, Fetch]


def test_where_memory_is_less_than_the_models_each_starts_in_the_place_of_one_that_nobody_uses() -> None:
    deployed = [model(name) for name in "abcdef"]
    cluster = ClusterModel(nodes(2, memory=250 * MB), deployed, Options(Bounds(keep_alive_s=1.0)))
    cluster.run(10)
    assert sum(len(node.copies) for node in cluster.nodes.values()) == 4  # the pool, as far as there is room
    for name in "fedcbafedcba":
        cluster.load(name, waiting=1)
        cluster.run(5)
        assert len(cluster.instances(name)) == 1, name
        cluster.load(name)
        cluster.run(5)
        assert not cluster.instances(name)
        assert all(node.free_bytes >= 0 for node in cluster.nodes.values())
    settled = cluster.run(5)
    assert not settled  # nothing is fetched for the pool in the place of other models


def test_where_memory_is_less_than_the_models_the_pool_pins_nothing() -> None:
    deployed = [model(name) for name in "abcdef"]
    cluster = ClusterModel(nodes(2, memory=250 * MB), deployed, Options(Bounds(keep_alive_s=1.0)))
    cluster.run(10)
    assert not any(copy.pinned for node in cluster.nodes.values() for copy in node.copies)
    cluster.nodes |= {node.name: node for node in nodes(4, memory=250 * MB) if node.name not in cluster.nodes}
    cluster.run(10)
    assert sum(copy.pinned for node in cluster.nodes.values() for copy in node.copies) == 6


def test_an_instance_that_drains_goes_on_before_another_one_starts() -> None:
    cluster = ClusterModel(nodes(3), [model(min=1)])
    cluster.run(3)
    (instance,) = cluster.instances("m")
    node = cluster.nodes[instance.node]
    cluster.nodes[node.name] = replace(node, instances=(replace(instance, state="draining", running=2),))
    cluster.load("m", running=2)
    decisions = cluster.tick()
    assert of(ResumeInstance, decisions) == [ResumeInstance(instance.id, node.name, "the load needs it again")]
    assert not of(StartInstance, decisions)
    cluster.nodes[node.name] = replace(node, instances=(replace(instance, state="draining"),))  # it is gone at once
    decisions = cluster.tick()
    assert not of(ResumeInstance, decisions)
    assert len(of(StartInstance, decisions)) == 1


def test_a_model_that_serves_keeps_its_copy_from_one_that_waits() -> None:
    cluster = ClusterModel(nodes(1, memory=150 * MB, devices=2), [model("a", min=1), model("b")])
    cluster.run(5)
    cluster.load("b", waiting=1)
    assert not of(Drop, cluster.run(5))
    assert len(cluster.instances("a")) == 1


def test_senders_that_serve_are_paced_while_they_send() -> None:
    cluster = ClusterModel(nodes(2), [model(min=1)])
    cluster.run(3)
    (instance,) = cluster.instances("m")
    node = cluster.nodes[instance.node]
    cluster.nodes[instance.node] = replace(node, instances=(replace(instance, running=1),))
    cluster.load("m", running=16)
    decisions = cluster.run(3)
    assert of(Pace, decisions) == [Pace(instance.node, 42.5e6), Pace(instance.node, None)]


def test_a_node_that_was_away_is_told_then_that_its_limit_has_ended() -> None:
    cluster = ClusterModel(nodes(2, pace_bytes_per_s=42.5e6), [])
    cluster.kill("n1")
    assert cluster.tick() == [Pace("n0", None)]
    assert not cluster.run(1)
    cluster.nodes["n1"] = replace(cluster.nodes["n1"], state="alive")
    assert cluster.run(1) == [Pace("n1", None)]


def test_a_cold_model_starts_on_several_nodes_when_its_slo_needs_it() -> None:
    deployment = model(times=TIMES, layers=10, ttft_slo_s=1.0, tpot_slo_s=0.1)
    cluster = ClusterModel(nodes(6), [deployment], Options(largest_group=4, pool=False))
    cluster.load("m", waiting=1)
    decisions = cluster.tick()
    starts = of(StartInstance, decisions)
    assert [start.layers for start in starts] == [(0, 4), (4, 7), (7, 10)]  # 100 MB / 3 / 50 MB/s + 0.1 s < 1 s
    assert [start.full for start in starts] == [True, False, False]
    assert {fetch.layers for fetch in of(Fetch, decisions)} == {(0, 4), (4, 7), (7, 10)}
    assert all(fetch.sources == () for fetch in of(Fetch, decisions))
    cluster.load("m", running=1)
    consolidations = of(Consolidate, cluster.run(4))
    assert [decision.keep for decision in consolidations] == [(starts[0].id,)]
    assert len(cluster.instances("m")) == 1


def test_a_burst_on_a_cold_model_makes_instances_of_a_groups_workers() -> None:
    deployment = model(times=TIMES, layers=10, ttft_slo_s=1.0)
    cluster = ClusterModel(nodes(6), [deployment], Options(largest_group=4, pool=False))
    cluster.load("m", waiting=16)
    starts = of(StartInstance, cluster.tick())
    assert sum(start.full for start in starts) == 3
    assert len({start.group for start in starts}) == 1
    cluster.run(4)
    assert len(cluster.instances("m")) >= 2


def test_a_model_whose_weights_are_there_needs_no_group() -> None:
    deployment = model(times=TIMES, layers=10, ttft_slo_s=1.0)
    cluster = ClusterModel(nodes(6), [deployment], Options(largest_group=4))
    cluster.run(3)
    cluster.load("m", waiting=1)
    (start,) = of(StartInstance, cluster.tick())
    assert start.group is None


def test_new_instances_relieve_the_most_loaded_one_while_they_load() -> None:
    cluster = ClusterModel(nodes(3), [model(min=1)], Options(live=True))
    cluster.run(3)
    (instance,) = cluster.instances("m")
    cluster.load("m", running=8, waiting=8)
    starts = of(StartInstance, cluster.tick())
    assert [start.partner for start in starts].count(instance.id) == 1


def test_the_same_state_gives_the_same_decisions_and_a_new_memory_disturbs_nothing() -> None:
    cluster = ClusterModel(nodes(8), [model(), model("b", min=2)])
    cluster.load("m", waiting=20)
    for _ in range(30):
        state, memory = cluster.state, cluster.memory
        first, _ = decide(state, cluster.now_s, memory)
        second, _ = decide(state, cluster.now_s, replace(memory, index=Memory().index))
        assert first == second
        cluster.tick()
    cluster.memory = Memory()
    assert cluster.tick() == []


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_whatever_happens_nothing_waits_in_a_circle_and_the_cluster_settles(data: st.DataObject) -> None:
    options = Options(largest_group=data.draw(st.sampled_from([1, 4])), live=data.draw(st.booleans()))
    names = ["a", "b", "c"]
    deployed = [model(name, 40 * MB, times=TIMES, layers=8, ttft_slo_s=0.5) for name in names]
    cluster = ClusterModel(nodes(6, memory=130 * MB, devices=2), deployed, options)
    for _ in range(data.draw(st.integers(1, 25))):
        event = data.draw(st.sampled_from(["load", "quiet", "kill", "drain", "forget", "version", "none"]))
        name = data.draw(st.sampled_from(names))
        alive = [node.name for node in cluster.nodes.values() if node.state == "alive"]
        if event == "load":
            cluster.load(name, waiting=data.draw(st.integers(1, 40)))
        elif event == "quiet":
            cluster.load(name)
        elif event == "kill" and len(alive) > 3:
            cluster.kill(data.draw(st.sampled_from(alive)))
        elif event == "drain" and len(alive) > 3:
            chosen = data.draw(st.sampled_from(alive))
            cluster.nodes[chosen] = replace(cluster.nodes[chosen], state="draining")
        elif event == "forget":
            cluster.memory = Memory()
        elif event == "version":
            changed = cluster.deployments[name]
            cluster.deployments[name] = replace(changed, version=f"{len(changed.version)}{changed.version}")
        for _ in range(data.draw(st.sampled_from([1, 4]))):
            state, memory = cluster.state, cluster.memory
            anew = replace(memory, counted=replace(memory.counted, options=None), index=deepcopy(memory.index))
            counted_anew, _ = decide(state, cluster.now_s, anew, options)
            assert cluster.tick() == counted_anew  # no model was passed over that needed something
        _no_circle(cluster)
    for name in names:
        cluster.load(name)
    cluster.run(60, 0.5)
    assert cluster.tick() == []
    for name in names:
        held = [c for node in cluster.nodes.values() if node.state == "alive" and (c := node.copy(f"s3://{name}"))]
        assert sum(copy.pinned and copy.is_complete for copy in held) == 1
        assert cluster.instances(name) == []


def _no_circle(cluster: ClusterModel) -> None:
    for url in ("s3://a", "s3://b", "s3://c"):
        reads = {name: c.sources for name, node in cluster.nodes.items() if (c := node.copy(url)) and not c.is_complete}

        def check(name: str, seen: tuple[str, ...], reads: dict[str, tuple[str, ...]] = reads) -> None:
            assert name not in seen, f"{seen} → {name}"
            for source in reads.get(name, ()):
                check(source, (*seen, name))

        for name in reads:
            check(name, ())


@pytest.mark.parametrize("count", [0, 1])
def test_a_cluster_without_nodes_or_models_decides_nothing(count: int) -> None:
    cluster = ClusterModel(nodes(count), [] if count else [model(min=1)])
    decisions = cluster.run(1)
    assert of(Fetch, decisions) == of(StartInstance, decisions) == []
    cluster.loads["unknown"] = Load(waiting=3)
    cluster.tick()


def test_instances_start_on_the_devices_that_their_model_needs() -> None:
    made = [*nodes(2, device_kind="a10"), Node("v", link_bytes_per_s=1.0, memory_bytes=1000 * MB, device_kind="v100")]
    cluster = ClusterModel(made, [model(device_kind="v100")], Options(pool=False))
    cluster.load("m", waiting=1)
    assert [start.node for start in of(StartInstance, cluster.tick())] == ["v"]


def test_an_instance_gives_its_device_to_a_model_that_can_use_no_other_kind_and_moves() -> None:
    slow = Node("z", link_bytes_per_s=1e6, memory_bytes=1000 * MB, device_kind="l4")
    any_kind = model("any", min=1)
    cluster = ClusterModel([*nodes(1, device_kind="a10"), slow], [any_kind, model(device_kind="a10")])
    cluster.run(5)
    assert [instance.model for instance in cluster.nodes["n0"].instances] == ["any"]  # its link is faster
    cluster.load("m", waiting=1)
    log = cluster.run(150)
    assert [stop.reason for stop in of(StopInstance, log)] == ["another model needs its kind of device"]
    assert [instance.model for instance in cluster.nodes["n0"].instances] == ["m"]
    assert [instance.model for instance in cluster.nodes["z"].instances] == ["any"]


def test_models_that_need_one_kind_of_device_share_what_there_is_of_it() -> None:
    made = [*nodes(2, device_kind="a10"), *(replace(node, name=f"z{node.name}") for node in nodes(4))]
    cluster = ClusterModel(made, [model("a", device_kind="a10"), model("b", device_kind="a10")])
    cluster.load("a", waiting=64)
    cluster.run(5)
    assert len(cluster.instances("a")) == 2
    cluster.load("a", running=16)
    cluster.load("b", waiting=1)
    cluster.run(10)
    assert (len(cluster.instances("a")), len(cluster.instances("b"))) == (1, 1)


def test_without_care_for_links_nodes_are_taken_by_name() -> None:
    made = [replace(node, devices=2, link_bytes_per_s=rate) for node, rate in zip(nodes(2), (1.0, 50e6), strict=True)]
    cluster = ClusterModel(made, [model()], Options(pool=False, contention_aware=False))
    cluster.load("m", waiting=32)
    assert [start.node for start in of(StartInstance, cluster.tick())] == ["n0", "n0", "n1", "n1"]


def test_groups_that_start_together_share_what_their_nodes_fetch() -> None:
    deployment = model(times=TIMES, layers=8, ttft_slo_s=0.7, max=16)
    cluster = ClusterModel(nodes(4, devices=4), [deployment], Options(largest_group=4, pool=False))
    cluster.load("m", waiting=128)
    decisions = cluster.tick()
    starts, fetches = of(StartInstance, decisions), of(Fetch, decisions)
    assert len({start.group for start in starts}) == 4
    held = {fetch.node: fetch.layers for fetch in fetches}
    assert sorted(held.values()) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert all(held[start.node] == start.layers for start in starts)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=6), st.data())
def test_a_state_that_names_what_changed_is_decided_as_one_that_does_not(
    steps: list[set[int]], data: st.DataObject
) -> None:
    """Named are more nodes than have changed, too; one of them may be gone."""
    known = {node.name: node for node in nodes(6)}
    deployments = {"m": model()}
    named = unnamed = Memory()
    for step, numbers in enumerate(steps):
        for number in numbers:
            link = data.draw(st.sampled_from([50e6, 100e6]))
            known[f"n{number}"] = Node(f"n{number}", link_bytes_per_s=link, memory_bytes=1000 * MB)
        loads = {"m": Load(waiting=step, last_request_s=float(step))}
        names = [f"n{number}" for number in (*numbers, 0)]
        first, named = decide(ClusterState(dict(known), deployments, loads, names), float(step), named)
        second, unnamed = decide(ClusterState(dict(known), deployments, loads), float(step), unnamed)
        assert first == second
