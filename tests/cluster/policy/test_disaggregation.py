"""Ticks of a cluster whose instances of a model either prefill or decode."""

from __future__ import annotations

from dataclasses import replace

from cluster_model import ClusterModel, model, nodes, of
from medusa_cluster.policy.decide import Options
from medusa_cluster.policy.state import ChangeRole, StartInstance, StopInstance


def test_only_prefill_instances_relieve_prefill_instances() -> None:
    cluster = ClusterModel(nodes(8), [model(disaggregated=True, min=1, max=4)], Options(live=True))
    cluster.run(3)
    roles = {instance.id: instance.role for instance in cluster.instances("m")}
    cluster.load("m", waiting=32)
    starts = of(StartInstance, cluster.tick())
    assert {start.role for start in starts} == {"prefill", "decode"}
    partners = [(start.role, roles[start.partner]) for start in starts if start.partner is not None]
    assert partners == [("prefill", "prefill")]


def test_decode_instances_are_scaled_with_prefill_instances() -> None:
    deployment = model(disaggregated=True, max=4)
    cluster = ClusterModel(nodes(8), [deployment], Options(live=True))
    cluster.load("m", waiting=8)
    cluster.run(3)
    roles = sorted(instance.role for instance in cluster.instances("m"))
    assert "decode" in roles
    assert "prefill" in roles
    cluster.load("m", waiting=32)
    before = len(roles)
    decisions = cluster.tick()
    assert of(ChangeRole, decisions) == []  # no prefill instance can be spared
    assert {start.role for start in of(StartInstance, decisions)} == {"prefill", "decode"}
    cluster.run(3)
    assert len(cluster.instances("m")) > before
    cluster.load("m", running=64)
    assert {change.role for change in of(ChangeRole, cluster.tick())} == {"decode"}  # they have the weights already


def test_without_prescaling_requests_count_where_their_keys_and_values_are() -> None:
    for prescale in (False, True):
        cluster = ClusterModel(nodes(8), [model(disaggregated=True, max=4)], Options(prescale=prescale))
        cluster.load("m", waiting=1)
        cluster.run(3)
        assert [instance.role for instance in cluster.instances("m")].count("decode") == 1
        cluster.load("m", running=64, kv_use=0.5)
        assert bool(of(StartInstance, cluster.tick())) == prescale
        if not prescale:
            cluster.load("m", running=64, kv_use=1.0)
            assert {start.role for start in of(StartInstance, cluster.tick())} == {"decode"}


def test_one_that_decodes_on_a_node_that_drains_stays_until_another_one_does() -> None:
    cluster = ClusterModel(nodes(3), [model(disaggregated=True, max=1)], Options(live=True))
    cluster.load("m", waiting=1)
    cluster.run(3)
    (decode,) = (instance for instance in cluster.instances("m") if instance.role == "decode")
    cluster.load("m", running=1)
    cluster.nodes[decode.node] = replace(cluster.nodes[decode.node], state="draining")
    decisions = cluster.tick()
    assert decode.id not in [stop.id for stop in of(StopInstance, decisions)]
    (change,) = of(ChangeRole, decisions)  # the one that prefills has the weights
    assert change.role == "decode"


def test_of_two_that_decode_the_deserted_one_ends() -> None:
    """It has the requests, but perhaps hangs."""
    cluster = ClusterModel(nodes(4), [model(disaggregated=True, max=1)], Options(live=True))
    cluster.load("m", waiting=1)
    cluster.run(3)
    (old,) = (instance for instance in cluster.instances("m") if instance.role == "decode")
    (new,) = (instance for instance in cluster.instances("m") if instance.role == "prefill")
    for one, changes in ((old, {"running": 8, "deserted": True}), (new, {"role": "decode"})):
        cluster.nodes[one.node] = replace(cluster.nodes[one.node], instances=(replace(one, **changes),))
    cluster.load("m", running=8)
    (stop,) = of(StopInstance, cluster.tick())
    assert stop.id == old.id


def test_no_more_start_in_order_to_prefill_than_others_decode_for() -> None:
    cluster = ClusterModel(nodes(60), [model(disaggregated=True, min=1, max=40)], Options(live=True))
    cluster.load("m", waiting=400)
    cluster.tick()
    roles = [instance.role for state in ("starting", "ready") for instance in cluster.instances("m", state)]
    assert roles.count("prefill") <= 8 * roles.count("decode")


def test_while_none_may_prefill_those_that_decode_take_the_load() -> None:
    cluster = ClusterModel(nodes(6), [model(disaggregated=True, may_prefill=False, max=4)], Options(live=True))
    cluster.load("m", waiting=32)
    cluster.run(3)
    assert [instance.role for instance in cluster.instances("m")] == ["decode"] * 4


def test_one_that_prefills_starts_on_what_those_compute_on_that_decode() -> None:
    kinds = [replace(node, device_kind=kind) for node, kind in zip(nodes(4), "abbb", strict=True)]
    cluster = ClusterModel(kinds[:1], [model(disaggregated=True, max=1)], Options(live=True))
    cluster.load("m", waiting=1)
    cluster.run(2)
    cluster.nodes |= {node.name: node for node in kinds[1:]}
    cluster.load("m", waiting=1, running=1)
    cluster.run(2)
    assert [(instance.role, instance.node) for instance in cluster.instances("m")] == [("decode", "n0")]
