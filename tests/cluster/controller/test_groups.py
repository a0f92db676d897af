"""A model that one node cannot start in time starts as a group, which becomes as many instances as are needed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from medusa_cluster.controller.cluster import Cluster
from medusa_cluster.policy.state import Processor
from waiting import until_async

Run = Callable[..., None]
MODEL = {"name": "m", "url": "http://store/m", "max": 1, "ttft_slo_s": 2.0}  # 4e8 bytes over links of 1e8 a second


async def started(net: Any, cluster: Cluster) -> list[Any]:
    """Deploy, ask, and wait for the group; its workers' instances by rank."""
    for node in net.nodes.values():
        node.arrives = True
    await cluster.answer({"op": "deploy", "arguments": MODEL})
    await until_async(lambda: cluster.models.get(MODEL["url"]))
    asked(cluster)
    await until_async(
        lambda: len(cluster.state.instances) > 1 and all(one.confirmed for one in cluster.state.instances.values())
    )
    return sorted(cluster.state.instances.values(), key=lambda one: one.rank)


def asked(cluster: Cluster) -> None:
    cluster._report({"gateway": "g", "url": None, "loads": {"m": {"waiting": 1}}})


def routed(cluster: Cluster) -> list[str]:
    return [item["id"] for item in cluster.state.routes.current["models"]["m"]["instances"] if item["state"] == "ready"]


def shown(net: Any, worker: Any) -> dict[str, Any]:
    found: dict[str, Any] = net.nodes[worker.node].instances[worker.id]
    return found


def ended(net: Any, cluster: Cluster, state: str, **group: Any) -> Callable[[], Awaitable[None]]:
    async def body() -> None:
        workers = await started(net, cluster)
        leader = workers[0]
        assert routed(cluster) == [leader.id]
        assert len({worker.node for worker in workers}) == len(workers) >= 3
        assert shown(net, leader)["group"]["layers"].startswith("0:")
        if state == "consolidated":
            for node in net.nodes.values():
                node.arrived()
            told = await until_async(lambda: [call for call in net.calls() if call["op"] == "consolidate"])
            assert (told[0]["id"], told[0]["keep"]) == (leader.id, 1)
        shown(net, leader)["group"] |= {"state": state, **group}
        await until_async(lambda: list(cluster.state.instances) == [leader.id])
        assert routed(cluster) == [leader.id]
        assert leader.group is None

    return body


def test_a_group_starts_and_becomes_one_instance(run: Run) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        await ended(net, cluster, "consolidated", keep=1)()
        kinds = [event["kind"] for event in cluster.state.events]
        assert kinds.index("group") < kinds.index("consolidate") < kinds.index("group-consolidated")

    run(scenario, "n1", "n2", "n3", "n4")


def test_a_leader_that_goes_on_alone_is_the_instance(run: Run) -> None:
    run(lambda net, cluster: ended(net, cluster, "alone")(), "n1", "n2", "n3", "n4")


def test_workers_without_a_leader_end_and_it_starts_again(run: Run) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        workers = await started(net, cluster)
        gone = {worker.id for worker in workers}
        del net.nodes[workers[0].node].instances[workers[0].id]
        await until_async(lambda: not gone & cluster.state.instances.keys())
        await until_async(lambda: (asked(cluster), routed(cluster))[1])

    run(scenario, "n1", "n2", "n3", "n4")


def test_a_group_that_cannot_start_is_one_instance(run: Run) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        for node in net.nodes.values():
            node.refuses_groups = "no port is free"
            node.arrives = True
        await cluster.answer({"op": "deploy", "arguments": MODEL})
        await until_async(lambda: cluster.models.get(MODEL["url"]))
        await until_async(lambda: (asked(cluster), routed(cluster))[1])
        assert len(cluster.state.instances) == 1
        assert next(iter(cluster.state.instances.values())).group is None

    run(scenario, "n1", "n2", "n3", "n4")


def test_a_group_whose_start_fails_in_an_unforeseen_way_is_one_instance(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        reached = net.call

        async def call(node: str, request: dict[str, Any], timeout_s: float) -> Any:
            if request["op"] == "group_port":
                raise ValueError("no error of ours")
            return await reached(node, request, timeout_s)

        monkeypatch.setattr(net, "call", call)
        for node in net.nodes.values():
            node.arrives = True
        await cluster.answer({"op": "deploy", "arguments": MODEL})
        await until_async(lambda: cluster.models.get(MODEL["url"]))
        await until_async(lambda: (asked(cluster), routed(cluster))[1])
        assert [item.group for item in cluster.state.instances.values()] == [None]

    run(scenario, "n1", "n2", "n3", "n4")


def test_a_model_whose_workers_end_by_themselves_is_one_instance(run: Run) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        workers = await started(net, cluster)
        for worker in workers:
            shown(net, worker).update(state="failed", failure="a group takes no --tensor-parallel")
        await until_async(lambda: not {worker.id for worker in workers} & cluster.state.instances.keys())
        await until_async(lambda: (asked(cluster), routed(cluster))[1])
        assert [instance.group for instance in cluster.state.instances.values()] == [None]
        (model,) = (await cluster.answer({"op": "status"}))["models"]
        assert model["layers"] == 0, "it may start as a group again at once"

    run(scenario, "n1", "n2", "n3", "n4")


def test_a_start_is_compared_with_its_prediction(run: Run) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        leader = (await started(net, cluster))[0]
        shown(net, leader)["start"] = {"ttft_s": 1.5, "begins_s": 0.25, "prefill_s": 0.125}
        starts = await until_async(lambda: cluster.models.starts(MODEL["url"]))
        assert (starts[0]["workers"], starts[0]["ttft_s"]) == (leader.workers, 1.5)
        assert 0 < starts[0]["predicted_s"] < 2.0
        times = cluster.models.times(MODEL["url"])
        assert times is not None
        assert (times.container_s, times.prefill_s) == (0.25, 0.125)
        shown(net, leader)["start"]["decode_s"] = 0.09
        await until_async(lambda: "decode_s" in cluster.models.starts(MODEL["url"])[0])
        assert "t_n" not in cluster.models.learned(MODEL["url"]), "no instance alone has been seen to decode"
        model = cluster.models.get(MODEL["url"])
        assert model is not None
        model.starts[Processor()].append(
            {"begins_s": 0.25, "prefill_s": 0.125, "ttft_s": 2.0, "workers": 1, "decode_s": 0.05}
        )
        learned = cluster.models.learned(MODEL["url"])
        assert learned["t_d"] == 0.05
        assert learned["t_n"] == pytest.approx(0.04 / leader.workers)

    run(scenario, "n1", "n2", "n3", "n4")


def test_a_group_that_is_ended_before_its_nodes_were_told_is_not_started(run: Run) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        asking, ended = asyncio.Event(), asyncio.Event()

        async def group_port(_: Any) -> dict[str, Any]:
            asking.set()
            await ended.wait()
            return {"port": 9}

        for node in net.nodes.values():
            node.arrives, node.group_port = True, group_port
        await cluster.answer({"op": "deploy", "arguments": MODEL})
        await until_async(lambda: cluster.models.get(MODEL["url"]))
        asked(cluster)
        await asking.wait()
        await cluster.answer({"op": "remove", "arguments": {"name": "m"}})
        await until_async(lambda: not cluster.state.instances)
        ended.set()
        await until_async(lambda: not any(key[0] == "start" for key in cluster.execution._running))
        assert not [call for call in net.calls() if call["op"] == "start"]
        assert "start-failed" not in [event["kind"] for event in cluster.state.events]

    run(scenario, "n1", "n2", "n3", "n4")


def test_what_was_learned_from_a_start_is_forgotten_with_its_instance(run: Run) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        leader = (await started(net, cluster))[0]
        shown(net, leader)["start"] = {"ttft_s": 1.5, "begins_s": 0.25, "prefill_s": 0.125}
        node = cluster.state.nodes[leader.node]
        await until_async(lambda: leader.id in node.starts)
        del net.nodes[leader.node].instances[leader.id]
        await until_async(lambda: leader.id not in cluster.state.instances)
        assert not node.starts

    run(scenario, "n1", "n2", "n3", "n4")
