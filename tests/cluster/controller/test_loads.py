"""Instances report how full they are and how fast they compute, and a cluster has as many as these figures ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from medusa_cluster.controller.cluster import Cluster
from medusa_cluster.controller.reports import node_status
from medusa_runtime.errors import ClusterError
from waiting import until_async

from .conftest import Net

Run = Callable[..., None]
URL = "http://store/m"


async def ask(cluster: Cluster, operation: str, **arguments: Any) -> Any:
    return await cluster.answer({"op": operation, "arguments": arguments})


@pytest.mark.parametrize(
    ("shown", "load", "most"),
    [
        ({"running": 4, "kv_use": 0.5}, {"running": 4, "tokens_per_s": 900}, 1),
        ({"running": 4, "kv_use": 1.0}, {"running": 4}, 2),
        ({"running": 4, "prefill_tokens_per_s": 1000}, {"running": 4, "tokens_per_s": 600}, 1),
        ({"running": 4, "prefill_tokens_per_s": 1000}, {"running": 4, "tokens_per_s": 900}, 2),
    ],
)
def test_instances_are_added_by_what_they_say(
    shown: dict[str, float], load: dict[str, float], most: int, run: Run
) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await ask(cluster, "deploy", name="m", url=URL, min=1, max=2, settings={"max_concurrency": "64"})
        node = await until_async(lambda: next((one for one in net.nodes.values() if one.instances), None))
        await until_async(lambda: cluster.models.get(URL))
        (item,) = node.instances.values()
        item |= shown
        await until_async(lambda: cluster.state.instances[item["id"]].running == 4)
        await ask(cluster, "report", gateway="g", url="http://g", loads={"m": load})
        await asyncio.sleep(1.0)  # several ticks
        assert len(cluster.state.instances) == most
        rate = shown.get("prefill_tokens_per_s")
        assert (await ask(cluster, "status"))["models"][0]["learned"].get("prefill_tokens_per_s") == rate

    run(scenario, "a", "b")


def test_what_cannot_be_the_use_of_a_cache_is_refused() -> None:
    instance = {"id": "i", "model": "m", "state": "ready", "age_s": 1.0, "running": 1}
    node_status({"instances": [instance | {"kv_use": 1}]})
    for wrong in ({"kv_use": 1.1}, {"kv_use": -1}, {"prefill_tokens_per_s": float("nan")}):
        with pytest.raises(ClusterError, match="expected the status of a node, found instances"):
            node_status({"instances": [instance | wrong]})
