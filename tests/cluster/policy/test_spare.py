"""Nodes that are asked for, given back and taken back, where an autoscaler adds and ends machines."""

from __future__ import annotations

from dataclasses import replace

from cluster_model import ClusterModel
from medusa_cluster.policy.decide import Options
from medusa_cluster.policy.state import RequestNodes, SetSpare

from .test_decide import MB, model, nodes, of


def test_nodes_that_come_one_by_one_are_not_asked_for_twice() -> None:
    cluster = ClusterModel(nodes(1), [model(min=4)])
    assert of(RequestNodes, cluster.run(1)) == [RequestNodes(4)]
    for name in ("n1", "n2"):
        cluster.nodes[name] = replace(cluster.nodes["n0"], name=name, copies=(), instances=(), memory_used_bytes=0)
        assert of(RequestNodes, cluster.run(5)) == []
    cluster.nodes["n1"] = replace(cluster.nodes["n1"], state="draining")  # Ray counts it still
    assert of(RequestNodes, cluster.run(5)) == [RequestNodes(5)]


def test_nodes_without_work_are_given_back_and_taken_back_before_others_are_asked_for() -> None:
    found = nodes(4)
    cluster = ClusterModel([replace(found[0], stays=True), *found[1:]], [model()], Options(least_nodes=2))
    cluster.load("m", waiting=32)
    assert of(SetSpare, cluster.run(60)) == []
    cluster.load("m")
    given = of(SetSpare, cluster.run(200))
    assert [change.spare for change in given] == [True, True]  # two stay
    assert {change.node for change in given} < {"n1", "n2", "n3"}
    assert len([name for name in cluster.copies("s3://m") if not cluster.nodes[name].spare]) > 0
    cluster.load("m", waiting=32)
    decisions = cluster.run(1)
    assert [change.spare for change in of(SetSpare, decisions)] == [False, False]
    assert of(RequestNodes, decisions) == []
    assert len(cluster.instances("m")) == 4


def test_a_node_whose_copies_have_no_other_room_is_not_given_back() -> None:
    cluster = ClusterModel(nodes(2, memory=100 * MB), [model("a"), model("b")], Options(least_nodes=1))
    assert of(SetSpare, cluster.run(100)) == []
    del cluster.deployments["b"]
    assert len(of(SetSpare, cluster.run(100))) == 1
    assert len([name for name in cluster.copies("s3://a") if not cluster.nodes[name].spare]) == 1


def test_nodes_stay_without_an_autoscaler() -> None:
    assert of(SetSpare, ClusterModel(nodes(3), [model()]).run(100)) == []
