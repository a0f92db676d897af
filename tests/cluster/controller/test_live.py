"""A model with live scaling: an instance that is added helps a loaded one, and is asked when it has its weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from medusa_cluster.controller.cluster import Cluster
from medusa_cluster.policy.state import StopInstance
from medusa_runtime.errors import ConfigError
from waiting import until_async

Run = Callable[..., None]
MODEL = {"name": "m", "url": "http://store/m", "max": 3, "live_scaling": True}


async def first(net: Any, cluster: Cluster, **given: Any) -> Any:
    """Deploy, ask, and wait for the first instance."""
    for node in net.nodes.values():
        node.arrives = True
    await cluster.answer({"op": "deploy", "arguments": MODEL | given})
    await until_async(lambda: cluster.models.get(MODEL["url"]))
    asked(cluster, waiting=1)
    (found,) = await until_async(lambda: [one for one in cluster.state.instances.values() if one.confirmed])
    for node in net.nodes.values():
        node.arrived()
    return found


def asked(cluster: Cluster, **load: int) -> None:
    cluster._report({"gateway": "g", "url": None, "loads": {"m": load}})


async def loaded(cluster: Cluster, count: int, **load: int) -> list[Any]:
    """Report a load for so many instances until they are there."""

    def there() -> list[Any]:
        asked(cluster, running=8, waiting=8 * (count - 1), **load)
        found = list(cluster.state.instances.values())
        return found if len(found) == count and all(one.confirmed for one in found) else []

    found: list[Any] = await until_async(there)
    return found


def routed(cluster: Cluster) -> set[str]:
    return {item["id"] for item in cluster.state.routes.current["models"]["m"]["instances"]}


def plans(net: Any) -> list[Any]:
    return [call.get("group") for call in net.calls() if call["op"] == "start"]


def test_a_new_instance_helps_the_loaded_one_and_serves_when_it_has_its_weights(run: Run) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        source = await first(net, cluster)
        _, helper = await loaded(cluster, 2)
        waits, helps = plans(net)
        assert (waits["mode"], waits["rank"], helps["rank"]) == ("live", 0, 1)
        assert {key: helps[key] for key in ("group", "token", "leader")} == {
            key: waits[key] for key in ("group", "token", "leader")
        }
        assert (helper.helps, helper.helping, helper.loading) == (source.id, True, True)
        assert routed(cluster) == {source.id}
        (model,) = (await cluster.answer({"op": "status"}))["models"]
        assert (model["instances"], model["starting"]) == (1, 1)
        assert waits["token"] not in str(await cluster.answer({"op": "status"}))
        net.nodes[helper.node].become(helper.id, "released")
        await until_async(lambda: routed(cluster) == {source.id, helper.id})
        assert "live" in [event["kind"] for event in cluster.state.events]

    run(scenario, "n1", "n2")


@pytest.mark.parametrize(("waiting", "rank"), [(1_000, 0), (100_000, 1)])
def test_a_new_instance_helps_only_if_first_tokens_would_else_be_late(run: Run, waiting: int, rank: int) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        source = await first(net, cluster, ttft_slo_s=30.0)
        net.nodes[source.node].instances[source.id] |= {"running": 8, "prefill_tokens_per_s": 1000}
        await until_async(lambda: cluster.models.prefill_tokens_per_s(MODEL["url"]))
        await loaded(cluster, 2, unanswered_tokens=waiting)
        assert [plan["rank"] for plan in plans(net)] == [0, rank]

    run(scenario, "n1", "n2")


def test_one_instance_is_helped_by_one_at_a_time(run: Run) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        await first(net, cluster)
        await loaded(cluster, 3)
        assert sorted(plan["rank"] for plan in plans(net)) == [0, 0, 1]

    run(scenario, "n1", "n2", "n3")


async def next_plan(net: Any, cluster: Cluster, failed: Any) -> Any:
    """The plan of the instance that is started when the ``failed`` one is forgotten and a request waits."""
    await until_async(lambda: failed.id not in cluster.state.instances)
    del net.nodes[failed.node].instances[failed.id]

    def again() -> bool:
        asked(cluster, waiting=1)
        return len(plans(net)) == 2

    await until_async(again)
    return plans(net)[1]


def test_a_model_that_cannot_be_shared_starts_without_it(run: Run) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        source = await first(net, cluster)
        failed = {"state": "failed", "failure": "an encoder cannot be split"}
        net.nodes[source.node].instances[source.id] |= failed
        asked(cluster, waiting=1)
        assert await next_plan(net, cluster, source) is None

    run(scenario, "n1", "n2")


def test_a_source_that_dies_after_it_has_served_leaves_live_scaling_on(run: Run) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        source = await first(net, cluster)
        source.since_s -= 60.0
        net.nodes[source.node].instances[source.id] |= {"state": "failed", "failure": "it was killed"}
        assert (await next_plan(net, cluster, source))["mode"] == "live"

    run(scenario, "n1", "n2")


def test_a_source_that_dies_while_it_drains_leaves_live_scaling_on(run: Run) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        source = await first(net, cluster)
        net.cut.add(source.node)  # the order to end does not reach it
        net.serving.add(source.node)
        cluster.execution.begin(StopInstance(source.id, source.node, 0.0))
        net.nodes[source.node].instances[source.id] |= {"state": "failed", "failure": "it was killed"}
        await until_async(lambda: source.id not in cluster.state.instances)
        assert cluster.models.scales_live(cluster.state.deployments["m"], time.monotonic())

    run(scenario, "n1", "n2")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"live_scaling": "yes"}, "expected true or false"),
        ({"engine": "vllm"}, "expected the engine torch without adapters, found the engine vllm"),
        ({"settings": {"lora_modules": "a=/a"}}, "found the engine torch and adapters"),
    ],
)
def test_what_cannot_scale_live_is_refused(run: Run, given: dict[str, Any], named: str) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        with pytest.raises(ConfigError, match=named):
            await cluster.answer({"op": "deploy", "arguments": MODEL | given})

    run(scenario, "n1")
