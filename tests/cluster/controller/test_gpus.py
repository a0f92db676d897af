"""Nodes with GPUs: what they say of them reaches the policy, and what needs them starts there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from medusa_adapters.cli.cluster.status import table
from medusa_cluster.controller.cluster import Cluster
from medusa_cluster.controller.live import Live
from medusa_cluster.controller.models import KnownModel
from medusa_cluster.controller.nodes import KnownInstance, KnownNode, Rendezvous
from medusa_cluster.controller.plan_file import ClusterPlan
from medusa_cluster.controller.state import State
from medusa_cluster.controller.view import policy_state
from medusa_cluster.deployment import Deployment
from medusa_cluster.group.ranges import ModelBytes
from medusa_cluster.policy.state import Processor
from medusa_runtime.state.stage_times import StageTimes
from waiting import until_async

from .conftest import Net

Run = Callable[..., None]
MODEL = {"name": "m", "url": "http://store/m", "max": 1, "ttft_slo_s": 2.0}  # 4e8 bytes over links of 1e8 a second
A10 = {"devices": 1, "device_name": "A10", "device_bytes": 24 * 10**9, "device_free_bytes": [23 * 10**9]}


def has(net: Net, name: str, **status: Any) -> None:
    """Let a node say more in its status."""
    node = net.nodes[name]
    plain = node.status

    async def said(request: dict[str, Any]) -> dict[str, Any]:
        return await plain(request) | status

    node.status = said  # type: ignore[method-assign]


async def asked_for(net: Net, cluster: Cluster, **changes: Any) -> None:
    """Deploy the model, and have a request wait for it once a node has described it and said what it has."""
    for node in net.nodes.values():
        node.arrives = True
    await cluster.answer({"op": "deploy", "arguments": MODEL | changes})
    await until_async(lambda: cluster.models.get(MODEL["url"]))  # type: ignore[arg-type]
    await until_async(lambda: all("device_name" in cluster.state.nodes[n].status or n[0] != "g" for n in net.nodes))
    cluster._report({"gateway": "g", "url": None, "loads": {"m": {"waiting": 1}}})


def events(cluster: Cluster, kind: str) -> list[str]:
    return [event["text"] for event in cluster.state.events if event["kind"] == kind]


def test_what_nodes_say_of_their_gpus_reaches_the_policy(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        free = [23 * 10**9, 22 * 10**9, 21 * 10**9, 20 * 10**9]
        has(net, "g1", **A10 | {"devices": 4, "load_bytes_per_s": 2e10, "device_free_bytes": free})
        settings = {"tensor_parallel": "2", "max_model_len": "1000", "device": "cuda"}
        await cluster.answer({"op": "deploy", "arguments": MODEL | {"engine": "vllm", "settings": settings}})
        await until_async(lambda: cluster.models.get(MODEL["url"]))  # type: ignore[arg-type]
        await until_async(lambda: "device_name" in cluster.state.nodes["g1"].status)
        cluster.models.get(MODEL["url"]).kv_bytes_per_token = 10  # type: ignore[arg-type, union-attr]
        cluster._report({"gateway": "g", "url": None, "loads": {"m": {"waiting": 1}}})
        await until_async(lambda: cluster.state.instances)
        state = policy_state(cluster.state, cluster.models, cluster.execution.live, (), {})
        node, deployment = state.nodes["g1"], state.deployments["m"]
        assert (node.device_bytes, node.load_bytes_per_s) == (24 * 10**9, 2e10)
        assert node.device_free_bytes == tuple(free[2:]), "the node has not lent the first two yet"
        assert node.processor("auto") == Processor(True, "", "A10")
        assert [instance.slots for instance in node.instances] == [2]
        assert node.free_slots() == 2
        assert (deployment.device, deployment.devices, deployment.kv_bytes) == ("cuda", 2, 10_000)
        assert not deployment.gpu_groups
        status = await cluster.answer({"op": "status"})
        assert "link 100 MB/s, 4 GPUs (A10)\n" in table(status)
        shown = next(one for one in status["nodes"] if one["name"] == "g1")
        assert (shown["device_name"], shown["device_free_bytes"]) == ("A10", free)

    run(scenario, "g1", "c1")


def test_an_instance_takes_what_its_node_has_lent_it_whatever_its_deployment_asks_for_by_now(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        def shown(name: str, gpus: int, device: str) -> dict[str, Any]:
            return {"id": name, "model": "m", "state": "ready", "age_s": 0.0, "gpus": gpus, "device": device}

        there = [shown("i", 2, "auto"), shown("j", 0, "cpu")]
        has(net, "g1", **A10 | {"devices": 4, "device_free_bytes": [23 * 10**9] * 2, "instances": there})
        await until_async(lambda: len(cluster.state.instances) == 2)  # of a model that was removed
        node = policy_state(cluster.state, cluster.models, cluster.execution.live, (), {}).nodes["g1"]
        assert [(one.slots, one.device) for one in node.instances] == [(2, "auto"), (1, "cpu")]
        assert (node.free_slots(), node.free_slots("cpu"), node.returning) == (2, 0, 0)

    run(scenario, "g1")


def test_a_model_that_waits_for_a_gpu_says_so_once(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        has(net, "g1", **A10 | {"device_free_bytes": []})  # it was just given back
        await asked_for(net, cluster, ttft_slo_s=None)

        def asked_again() -> None:
            cluster._report({"gateway": "g", "url": None, "loads": {"m": {"waiting": 2}}})

        await until_async(lambda: asked_again() or events(cluster, "waits"))
        for _ in range(15):
            asked_again()
            await asyncio.sleep(0.1)
        needed = "a GPU with 2.1 GB free or a node without GPUs"
        assert events(cluster, "waits") == [f"m waits for {needed}: g1 has one soon"]
        assert not cluster.state.instances, "a processor is free, but the GPU will be"
        has(net, "g1", **A10)
        await until_async(lambda: asked_again() or cluster.state.instances)
        (start,) = await until_async(lambda: [call for call in net.calls() if call["op"] == "start"])
        assert start["device_bytes"] == 100 + (2 << 30)
        assert [one.node for one in cluster.state.instances.values()] == ["g1"]

    run(scenario, "g1", "c1")


def test_a_start_is_predicted_by_those_on_the_same_processor() -> None:
    times = StageTimes(0.5, 0.0, 0.0, 0.2, 0.05, 10, float("inf"), 0.0, 0)
    known = KnownModel(ModelBytes(0, (1,), 0), 10, times)
    gpu = Processor(True, "", "A10")
    assert known.measured(Processor()).times.device_s == 0.0
    assert known.measured(gpu).times.device_s > 0.2  # its CUDA context
    known.starts[gpu].append({"begins_s": 0.9, "prefill_s": 0.1, "workers": 1, "decode_s": 0.01})
    known.starts[gpu].append({"begins_s": 0.9, "prefill_s": 0.1, "workers": 2, "decode_s": 0.03})
    found = known.measured(gpu)
    assert (found.times.container_s, found.times.device_s, found.times.decode_s) == (0.9, 0.0, 0.01)
    assert found.hop_s == pytest.approx(0.01)
    assert known.measured(Processor()).times.container_s == 0.5


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"device_kind": "h100"}, "expected one with --device-kind h100, found none"),
        ({"settings": {"device": "cuda"}}, "expected one with a GPU for --set device=cuda, found none"),
    ],
)
def test_a_model_that_no_node_can_run_says_so_once(run: Run, asked: dict[str, Any], why: str) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await asked_for(net, cluster, **asked)
        await until_async(lambda: events(cluster, "no-node"))
        cluster._report({"gateway": "g", "url": None, "loads": {"m": {"waiting": 2}}})
        assert events(cluster, "no-node") == [f"m starts on no node: {why}"]
        assert not cluster.state.instances

    run(scenario, "c1")


@pytest.mark.parametrize("more", [{}, {"devices": 7, "devices_apart": True, "device_free_bytes": [10**10] * 7}])
def test_a_model_for_more_gpus_than_any_node_has_says_so(run: Run, more: dict[str, Any]) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        has(net, "g1", **A10 | more)
        await asked_for(net, cluster, engine="vllm", settings={"tensor_parallel": "2"})
        why = "expected one with 2 GPUs for --set tensor-parallel=2, found 1 at most"
        await until_async(lambda: events(cluster, "no-node") == [f"m starts on no node: {why}"])
        assert not cluster.state.instances

    run(scenario, "g1", "c1")  # also beside a node without GPUs


@pytest.mark.parametrize(("engine", "workers"), [("torch", 3), ("vllm", 1)])
def test_a_group_starts_on_gpus_of_one_kind_but_not_one_of_vllm(run: Run, engine: str, workers: int) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        for name in ("g1", "g2", "g3", "g4"):
            has(net, name, **A10 | {"device_name": "L4" if name == "g2" else "A10"})
        await asked_for(net, cluster, engine=engine)
        await until_async(lambda: any(call["op"] == "start" for call in net.calls()))
        await until_async(lambda: all(one.confirmed for one in cluster.state.instances.values()))
        started = {name for name, node in net.nodes.items() for call in node.calls if call["op"] == "start"}
        assert started <= {"g1", "g3", "g4"}
        assert len(started) == len(cluster.state.instances) == workers
        assert all((call.get("group") is not None) == (workers > 1) for call in net.calls() if call["op"] == "start")

    run(scenario, "g1", "g2", "g3", "g4", "n1")


@pytest.mark.parametrize(("name", "helps"), [("A10", True), ("L4", False)])
def test_an_instance_helps_one_on_a_gpu_of_the_same_kind(run: Run, name: str, helps: bool) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        has(net, "g1", **A10)
        has(net, "g2", **A10 | {"device_name": name})
        await asked_for(net, cluster, live_scaling=True, ttft_slo_s=None, max=2)
        await until_async(lambda: [one for one in cluster.state.instances.values() if one.confirmed])
        for node in net.nodes.values():
            node.arrived()

        def second() -> bool:
            cluster._report({"gateway": "g", "url": None, "loads": {"m": {"running": 8, "waiting": 8}}})
            return len([one for one in cluster.state.instances.values() if one.confirmed]) == 2

        await until_async(second)
        ranks = [call["group"]["rank"] for call in net.calls() if call["op"] == "start"]
        assert sorted(ranks) == ([0, 1] if helps else [0, 0])

    run(scenario, "g1", "g2")


def test_where_the_one_to_help_has_a_helper_another_of_the_same_kind_is_helped() -> None:
    state = State(ClusterPlan())
    for name, gpu in (("g1", "A10"), ("g2", "L4"), ("g3", "A10"), ("g4", "A10")):
        state.nodes[name] = KnownNode(name, A10 | {"device_name": gpu})
    state.deployments["m"] = Deployment("m", MODEL["url"], live_scaling=True)  # type: ignore[arg-type]

    def instance(node: str, running: int) -> KnownInstance:
        meets = Rendezvous(node, "host:1", "live")
        state.instances[node] = KnownInstance(node, "m", node, "ready", 0.0, running=running, meets=meets)
        return state.instances[node]

    instance("g1", 9)
    instance("g2", 8)
    state.instances["h"] = KnownInstance("h", "m", "g4", "ready", 0.0, helps="g1", helping=True)
    new = KnownInstance("new", "m", "g4", "starting", 0.0)
    live = Live(state, cast(Any, None), cast(Any, None))
    assert live._source(new, "g1") is None
    third = instance("g3", 1)
    assert live._source(new, "g1") is third
