"""A model that is deployed again: what serves, what ends, and what the status says meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_cluster.controller.cluster import Cluster
from waiting import until_async

from .conftest import Net

Run = Callable[..., None]
MODEL, OTHER, THIRD = "http://store/model", "http://store/other", "http://store/third"


async def ask(cluster: Cluster, operation: str, **arguments: Any) -> Any:
    return await cluster.answer({"op": operation, "arguments": arguments})


async def deploy(cluster: Cluster, url: str = MODEL, **fields: Any) -> str:
    """Deploy a model as ``m``, and return its revision."""
    found: str = (await ask(cluster, "deploy", **{"name": "m", "url": url, "min": 1} | fields))["revision"]
    return found


def ready(cluster: Cluster) -> list[str]:
    """The revisions of what gets requests."""
    found = cluster.state.routes.current["models"]["m"]["instances"]
    return [item["revision"] for item in found if item["state"] == "ready"]


def serves(cluster: Cluster, *revisions: str) -> bool:
    """True if these are ready to answer."""
    return ready(cluster) == list(revisions) and all(one.answers for one in cluster.state.instances.values())


def started(net: Net) -> list[str]:
    return [call["deployment"]["url"] for call in net.calls() if call["op"] == "start"]


def shown(cluster: Cluster, net: Net) -> list[str]:
    """The URLs of all instances on the nodes."""
    return sorted(item["url"] for node in net.nodes.values() for item in node.instances.values())


def set_loads(net: Net, loads: bool) -> None:
    for node in net.nodes.values():
        node.loads = loads


def loaded(net: Net) -> None:
    for node in net.nodes.values():
        node.loaded()


async def replacing(cluster: Cluster) -> str | None:
    found: str | None = (await ask(cluster, "status"))["models"][0]["replacing"]
    return found


class Recorder:
    """Notes which revisions got requests, in all routes that any gateway could have had."""

    def __init__(self, cluster: Cluster) -> None:
        self.seen: list[list[str]] = []
        publish = cluster.state._routes.publish

        def noted(models: dict[str, Any]) -> None:
            publish(models)
            if "m" in models:
                self.seen.append([one["revision"] for one in models["m"]["instances"] if one["state"] == "ready"])

        cluster.state._routes.publish = noted  # type: ignore[method-assign]


def test_a_model_that_listens_but_never_loads_is_tried_again_after_longer_and_longer_pauses(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        set_loads(net, False)
        await deploy(cluster)
        for count in (1, 2):
            await until_async(lambda count=count: len(started(net)) == count)  # type: ignore[misc]
            (instance,) = await until_async(lambda: [*cluster.state.instances.values()])
            await until_async(lambda instance=instance: instance.state == "ready" and instance.confirmed)  # type: ignore[misc]
            assert (await ask(cluster, "status"))["models"][0]["answering"] == 0
            instance.since_s -= 60.0  # it has loaded for a minute
            net.nodes["a"].fail(instance.id, "no weights")
            await until_async(lambda: not cluster.state.instances)
            assert cluster.execution._failures["m"][0] == count
            assert (await ask(cluster, "status"))["models"][0]["failure"] == "no weights"
        await until_async(lambda: len(started(net)) == 3)
        loaded(net)
        await until_async(lambda: (instances := [*cluster.state.instances.values()]) and instances[0].answers)
        assert "m" not in cluster.execution._failures
        model = (await ask(cluster, "status"))["models"][0]
        assert (model["failure"], model["answering"]) == (None, 1)

    run(scenario, "a")


@pytest.mark.parametrize("names", [("a", "b"), ("a",)], ids=["elsewhere", "beside"])
@pytest.mark.parametrize("change", [{"url": OTHER}, {"settings": {"threads": "1"}}], ids=["url", "settings"])
def test_requests_go_to_the_old_instance_until_the_new_one_answers(
    run: Run, names: tuple[str, ...], change: dict[str, Any]
) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        old = await deploy(cluster, max=4)
        await until_async(lambda: serves(cluster, old))
        assert await replacing(cluster) is None
        recorder = Recorder(cluster)
        set_loads(net, False)
        new = await deploy(cluster, **{"max": 4} | change)
        assert new != old
        await until_async(lambda: len(started(net)) == 2)
        await asyncio.sleep(1)  # some ticks
        assert ready(cluster) == [old]
        assert await replacing(cluster) == f"one instance of revision {old} until one of {new} can answer"
        loaded(net)
        await until_async(lambda: ready(cluster) == [new])
        await until_async(lambda: sum(len(node.instances) for node in net.nodes.values()) == 1)
        assert await replacing(cluster) is None
        await asyncio.sleep(1)
        switch = recorder.seen.index([new])
        assert all(seen == [old] for seen in recorder.seen[:switch])
        assert all(seen == [new] for seen in recorder.seen[switch:])
        assert len(started(net)) == 2  # one more at a time, though four may run

    run(scenario, *names)


def test_the_old_instance_serves_on_when_the_new_one_does_not_load_and_the_status_says_why(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        old = await deploy(cluster)
        await until_async(lambda: serves(cluster, old))
        recorder = Recorder(cluster)
        set_loads(net, False)
        await deploy(cluster, OTHER)
        for count in (2, 3):  # it is tried again, later and later
            await until_async(lambda count=count: len(started(net)) == count)  # type: ignore[misc]
            for node in net.nodes.values():
                for name, item in list(node.instances.items()):
                    if item["url"] == OTHER and item["state"] == "ready":
                        await until_async(lambda name=name: cluster.state.instances[name].confirmed)  # type: ignore[misc]
                        node.fail(name, "its weights are not those of the model")
            await until_async(lambda: len(cluster.state.instances) == 1)
        assert (await replacing(cluster) or "").endswith("failed: its weights are not those of the model")
        assert all(seen == [old] for seen in recorder.seen)
        assert cluster.execution._failures["m"][0] == 2
        set_loads(net, True)
        new = await deploy(cluster, THIRD)
        await until_async(lambda: ready(cluster) == [new])
        assert await replacing(cluster) is None

    run(scenario, "a", "b")


def test_a_start_that_its_node_refuses_ends_nothing(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        old = await deploy(cluster)
        await until_async(lambda: serves(cluster, old))
        for node in net.nodes.values():
            node.refuses = "no memory is left"
        await deploy(cluster, OTHER)
        await until_async(lambda: cluster.execution.failure("m"))
        assert "no memory is left" in (await replacing(cluster) or "")
        assert ready(cluster) == [old]

    run(scenario, "a", "b")


def test_deployed_back_while_it_is_replaced_the_old_instance_stays(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        old = await deploy(cluster)
        await until_async(lambda: serves(cluster, old))
        recorder = Recorder(cluster)
        set_loads(net, False)
        await deploy(cluster, OTHER)
        await until_async(lambda: shown(cluster, net) == [MODEL, OTHER])
        assert await deploy(cluster) == old
        await until_async(lambda: shown(cluster, net) == [MODEL])
        await asyncio.sleep(1)
        assert started(net) == [MODEL, OTHER]
        assert all(seen == [old] for seen in recorder.seen)

    run(scenario, "a", "b")


def test_a_deployment_that_comes_meanwhile_replaces_both(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        old = await deploy(cluster)
        await until_async(lambda: serves(cluster, old))
        recorder = Recorder(cluster)
        set_loads(net, False)
        await deploy(cluster, OTHER)
        await until_async(lambda: shown(cluster, net) == [MODEL, OTHER])
        new = await deploy(cluster, THIRD)
        await until_async(lambda: shown(cluster, net) == [MODEL, THIRD])
        loaded(net)
        await until_async(lambda: ready(cluster) == [new])
        await until_async(lambda: shown(cluster, net) == [THIRD])
        assert [seen for seen in recorder.seen if seen not in ([old], [new])] == []

    run(scenario, "a", "b")


def test_a_model_that_is_removed_meanwhile_leaves_nothing(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        old = await deploy(cluster)
        await until_async(lambda: serves(cluster, old))
        set_loads(net, False)
        await deploy(cluster, OTHER)
        await until_async(lambda: shown(cluster, net) == [MODEL, OTHER])
        await ask(cluster, "remove", name="m")
        await until_async(lambda: not shown(cluster, net) and not cluster.state.instances)
        loaded(net)
        again = await deploy(cluster, OTHER)
        set_loads(net, True)
        loaded(net)
        await until_async(lambda: ready(cluster) == [again])

    run(scenario, "a", "b")


def test_several_instances_are_replaced_one_by_one(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        old = await deploy(cluster, min=3, max=6)
        await until_async(lambda: serves(cluster, old, old, old))
        recorder, most = Recorder(cluster), 0
        new = await deploy(cluster, OTHER, min=3, max=6)
        while ready(cluster) != [new] * 3:
            most = max(most, sum(len(node.instances) for node in net.nodes.values()))
            await asyncio.sleep(0.01)
        assert most == 4
        assert all(len(seen) == 3 for seen in recorder.seen)
        assert [seen.count(new) for seen in recorder.seen] == sorted(seen.count(new) for seen in recorder.seen)
        await asyncio.sleep(1)
        assert shown(cluster, net) == [OTHER] * 3

    run(scenario, "a", "b", "c", "d")


@pytest.mark.parametrize("change", [{"max": 7}, {"weight": 2.0}, {"ttft_slo_s": 9.0}])
def test_a_change_of_the_scale_restarts_nothing(run: Run, change: dict[str, Any]) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        revision = await deploy(cluster)
        await until_async(lambda: ready(cluster) == [revision])
        assert await deploy(cluster, **change) == revision
        await asyncio.sleep(1)
        assert ready(cluster) == [revision]
        assert started(net) == [MODEL]

    run(scenario, "a", "b")


def test_where_nothing_runs_nothing_is_started(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await deploy(cluster, min=0)
        await deploy(cluster, OTHER, min=0)
        await asyncio.sleep(1)
        assert started(net) == []
        assert await replacing(cluster) is None

    run(scenario, "a")


def test_a_controller_that_starts_again_meanwhile_goes_on(run: Run, tmp_path: Path) -> None:
    net, revisions = Net(tmp_path, ("a", "b")), dict[str, str]()

    async def first(net: Net, cluster: Cluster) -> None:
        revisions["old"] = await deploy(cluster)
        await until_async(lambda: serves(cluster, revisions["old"]))
        set_loads(net, False)
        revisions["new"] = await deploy(cluster, OTHER)
        await until_async(lambda: shown(cluster, net) == [MODEL, OTHER])

    async def second(net: Net, cluster: Cluster) -> None:
        recorder = Recorder(cluster)
        await until_async(lambda: ready(cluster) == [revisions["old"]])
        await asyncio.sleep(1)
        assert ready(cluster) == [revisions["old"]]
        loaded(net)
        await until_async(lambda: ready(cluster) == [revisions["new"]])
        await until_async(lambda: shown(cluster, net) == [OTHER])
        assert [seen for seen in recorder.seen if len(seen) > 1] == []
        assert started(net) == [MODEL, OTHER]

    run(first, net=net)
    run(second, net=net)


def test_when_the_old_instance_is_lost_requests_wait_in_the_new_one(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        old = await deploy(cluster)
        await until_async(lambda: serves(cluster, old))
        set_loads(net, False)
        new = await deploy(cluster, OTHER)
        await until_async(lambda: shown(cluster, net) == [MODEL, OTHER])
        node = next(node for node in net.nodes.values() for item in node.instances.values() if item["url"] == MODEL)
        node.fail(next(iter(name for name, item in node.instances.items() if item["url"] == MODEL)), "killed")
        await until_async(lambda: ready(cluster) == [new])

    run(scenario, "a", "b")
