"""Ticks of a cluster whose instances of a model either prefill or decode."""

from __future__ import annotations

from cluster_model import ClusterModel, model, nodes, of
from medusa_cluster.policy.decide import Options
from medusa_cluster.policy.state import ChangeRole, StartInstance


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
