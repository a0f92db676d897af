"""Instances of a deployment that has changed: what starts beside them, and what ends first where there is no room."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster_model import MB, ClusterModel, model, nodes, of
from medusa_cluster.policy.state import Deployment, Instance, Node, StartInstance, StopInstance

NO_ROOM = "its deployment has changed, and there is no room for both"


def another(**changes: object) -> Deployment:
    return replace(model(**{"min": 1, **changes}), url="s3://other")  # type: ignore[arg-type]


def serving(cluster: ClusterModel) -> list[str]:
    return sorted(instance.url for instance in cluster.instances("m"))


def rolled(cluster: ClusterModel, deployment: Deployment, ticks: int = 200) -> int:
    """Deploy this, and return how many instances were ready at least until the cluster had settled."""
    cluster.redeploy(deployment)
    fewest = len(cluster.instances("m"))
    for _ in range(ticks):
        cluster.tick()
        fewest = min(fewest, len(cluster.instances("m")))
    assert cluster.tick() == []
    return fewest


@pytest.mark.parametrize("count", [1, 3])
def test_the_old_instances_serve_until_new_ones_are_ready(count: int) -> None:
    cluster = ClusterModel(nodes(count + 1), [model(min=count)])
    cluster.run(8)
    assert rolled(cluster, another(min=count)) == count
    assert serving(cluster) == ["s3://other"] * count


def test_one_more_than_the_load_needs_is_started_though_more_may_run() -> None:
    cluster = ClusterModel(nodes(4), [model(min=1)])
    cluster.run(8)
    cluster.redeploy(another())
    log = cluster.run(20)
    assert len(of(StartInstance, log)) == len(of(StopInstance, log)) == 1


def test_two_on_one_processor_stand_beside_each_other_while_one_starts() -> None:
    cluster = ClusterModel(nodes(1), [model(min=1)])
    cluster.run(8)
    assert rolled(cluster, another()) == 1
    assert serving(cluster) == ["s3://other"]


@pytest.mark.parametrize("made", [nodes(1, memory=150 * MB), nodes(1, devices=1)], ids=["memory", "accelerators"])
def test_without_room_for_both_the_old_one_ends_first(made: list[Node]) -> None:
    cluster = ClusterModel(made, [model(min=1)])
    cluster.run(8)
    if not made[0].devices:  # what is used is never dropped, so the pool makes room only afterwards
        cluster.redeploy(another())
        assert [stop.reason for stop in of(StopInstance, cluster.run(1))] == [NO_ROOM]
        return
    assert rolled(cluster, another()) == 0
    assert [stop.reason for stop in of(StopInstance, cluster.log)] == [NO_ROOM]
    assert serving(cluster) == ["s3://other"]


def test_of_several_without_room_one_ends_at_a_time() -> None:
    cluster = ClusterModel(nodes(3, devices=1), [model(min=3)])
    cluster.run(8)
    assert rolled(cluster, another(min=3)) == 2
    assert serving(cluster) == ["s3://other"] * 3


def test_nothing_ends_for_a_model_of_which_nothing_is_known() -> None:
    cluster = ClusterModel(nodes(1, devices=1), [model(min=1)])
    cluster.run(8)
    cluster.redeploy(another(size=0))
    assert of(StopInstance, cluster.run(1)) == []


def test_an_old_one_that_ends_leaves_its_place_before_another_one_ends() -> None:
    cluster = ClusterModel(nodes(2, devices=1), [model(min=2)])
    cluster.run(8)
    cluster.redeploy(another(min=2))
    (stop,) = of(StopInstance, cluster.tick())
    node = cluster.nodes[stop.node]
    draining = Instance(stop.id, "m", node.name, "draining", running=1, changed=True, url="s3://m")
    cluster.nodes[node.name] = replace(node, instances=(draining,))
    assert of(StopInstance, cluster.run(5)) == []


def test_of_two_deployments_no_workers_or_helpers_work_together() -> None:
    cluster = ClusterModel(nodes(3), [model(min=1)])
    cluster.run(8)
    (node,) = [node for node in cluster.nodes.values() if node.instances]
    for change in ({"group": "g"}, {"role": "prefill"}, {"state": "starting"}):
        shares = replace(node.instances[0], changed=True, **change)  # type: ignore[arg-type]
        cluster.nodes[node.name] = replace(node, instances=(shares,))
        cluster.deployments["m"] = another()
        (stop,) = of(StopInstance, cluster.tick())
        assert stop.reason == "its deployment has changed"


def test_when_the_load_falls_old_ones_end_and_the_last_one_serves_on() -> None:
    cluster = ClusterModel(nodes(4), [model(min=0, max=3)])
    cluster.load("m", waiting=24)
    cluster.run(8)
    assert len(cluster.instances("m")) == 3
    cluster.redeploy(replace(another(min=0, max=3), size_bytes=500 * MB))
    cluster.load("m", running=1)
    fewest = 3
    for _ in range(400):
        cluster.load("m", running=1)
        cluster.tick()
        fewest = min(fewest, len(cluster.instances("m")))
    assert fewest == 1
    assert serving(cluster) == ["s3://other"]
