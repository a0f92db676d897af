"""Nodes and gateways that report nonsense, and callers with hostile arguments: one of them must not stop the others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import pytest
from fuzzing import fuzz
from hypothesis import strategies as st
from medusa_cluster.controller.cluster import Cluster
from medusa_cluster.controller.models import Models
from medusa_cluster.controller.reports import node_status
from medusa_runtime.errors import ClusterError, MedusaError
from waiting import until_async

from .conftest import Net

Run = Callable[..., None]
MODEL = "http://store/model"
STATUS: dict[str, Any] = {
    "name": "b", "address": "10.0.0.2", "url": "http://b:8114", "leaf": "", "state": "alive", "devices": 1,
    "link_bytes_per_s": 1e9, "memory_bytes": 1e9, "device_name": "A10", "device_bytes": 24e9, "load_bytes_per_s": 2e10,
    "device_free_bytes": [23e9],
    "models": [{"url": MODEL, "state": "done", "total_bytes": 9, "fetched_bytes": 9, "pinned": False,
                "excluded": {"http://a:8114": "wrong bytes"}}],
    "instances": [{"id": "i", "model": "m", "state": "ready", "age_s": 1.0, "running": 0, "group": None}],
}  # fmt: skip


async def ask(cluster: Cluster, operation: str, **arguments: Any) -> Any:
    return await cluster.answer({"op": operation, "arguments": arguments})


def test_a_gateway_that_reports_nonsense_stops_no_decision(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await ask(cluster, "deploy", name="m", url=MODEL)
        for loads in (None, [], {"m": 1}, {"m": {"waiting": "x"}}, {"m": {"waiting": float("nan")}}, {"m": {"a": []}}):
            with pytest.raises(MedusaError):
                await ask(cluster, "report", gateway="hostile", url=None, loads=loads)
        await ask(cluster, "report", gateway="<script>", url=None, loads={"unknown": {"waiting": 1e17}})
        await ask(cluster, "report", gateway="g", url="http://g", loads={"m": {"waiting": 1}})
        await until_async(
            lambda: any(item["state"] == "ready" for item in cluster.state.routes.current["models"]["m"]["instances"])
        )
        assert "hostile" not in cluster.state.gateways
        for number in range(1000):
            cluster.state.gateways[f"g{number}"] = cluster.state.gateways["g"]
        with pytest.raises(MedusaError, match="at most 1000 gateways"):
            await ask(cluster, "report", gateway="another", url=None, loads={})

    run(scenario, "a")


def test_a_node_that_reports_nonsense_stops_no_decision(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        async def lie(_: Any) -> dict[str, Any]:
            return STATUS | {"device_bytes": "24 GB"}

        await until_async(lambda: cluster.state.node_state(cluster.state.nodes["b"]) == "alive")
        net.nodes["b"].status = lie  # type: ignore[method-assign]
        why = 'the node b cannot be used: expected the status of a node, found device_bytes of "24 GB"'
        await until_async(lambda: cluster.state.nodes["b"].lost_at is not None)
        assert [event["text"] for event in cluster.state.events if event["kind"] == "node-refused"] == [why]
        await ask(cluster, "deploy", name="m", url=MODEL)
        await ask(cluster, "report", gateway="g", url="http://g", loads={"m": {"waiting": 1}})
        await until_async(
            lambda: any(item["state"] == "ready" for item in cluster.state.routes.current["models"]["m"]["instances"])
        )

    run(scenario, "a", "b")


def test_a_node_changes_no_instance_of_another_node(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await ask(cluster, "deploy", name="m", url=MODEL, min=1)
        await until_async(lambda: any(item.state == "ready" for item in cluster.state.instances.values()))
        (instance,) = cluster.state.instances.values()
        other = next(node for node in net.nodes.values() if node.name != instance.node)
        other.instances = {instance.id: {"id": instance.id, "model": "m", "state": "failed", "age_s": 0.0}}
        await until_async(lambda: any(event["kind"] == "node-refused" for event in cluster.state.events))
        other.device_kind = "x"
        await until_async(lambda: cluster.state.nodes[other.name].status.get("device_kind") == "x")
        assert cluster.state.instances[instance.id] is instance
        assert instance.state == "ready"
        why = f"the node {other.name} reports instances of other nodes, which is ignored: {instance.id} of "
        refused = [event["text"] for event in cluster.state.events if event["kind"] == "node-refused"]
        assert refused == [why + instance.node]

    run(scenario, "a", "b")


def test_a_report_may_say_the_gpus_of_an_instance_and_not_its_device(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await until_async(lambda: cluster.state.nodes["a"].status)
        node, shown = cluster.state.nodes["a"], {"model": "m", "state": "ready", "age_s": 0.0}
        first = {"id": "i", "gpus": 2, "version": None, **shown}
        node.status = node_status({**node.status, "instances": [first, {"id": "j", "device": "cpu", **shown}]})
        cluster._update_instances(node)
        found = cluster.state.instances
        assert [(found[name].slots, found[name].device) for name in "ij"] == [(2, "auto"), (1, "cpu")]
        assert found["i"].version == ""

    run(scenario, "a")


@pytest.mark.parametrize(
    "nonsense",
    [
        {"device_name": 7}, {"device_bytes": "24 GB"}, {"device_bytes": -1}, {"device_bytes": float("nan")},
        {"device_free_bytes": 23e9}, {"device_free_bytes": ["all"]}, {"device_free_bytes": [float("inf")]},
        {"load_bytes_per_s": 0}, {"load_bytes_per_s": None}, {"devices": "two"}, {"devices": -1},
    ],
)  # fmt: skip
def test_nonsense_about_gpus_is_named(nonsense: dict[str, Any]) -> None:
    (name,) = nonsense
    assert node_status(STATUS) == STATUS
    with pytest.raises(ClusterError, match=f"expected the status of a node, found {name} of "):
        node_status(STATUS | nonsense)


@pytest.mark.parametrize(
    "nonsense",
    [
        {"entry": float("inf")}, {"layers": [float("inf")]}, {"total_bytes": float("nan")}, {"layers": {}},
        {"exit": []}, {"times": 5}, {"times": "x"},
    ],
)  # fmt: skip
def test_a_description_of_nonsense_is_left_out(nonsense: dict[str, Any]) -> None:
    class Node:
        async def call(self, *_: Any) -> dict[str, Any]:
            return {"entry": 1, "layers": [1], "exit": 1, "total_bytes": 3, "times": None} | nonsense

    models = Models(cast(Any, Node()))
    asyncio.run(models._describe("a", MODEL))
    assert (models.get(MODEL) is None) == (nonsense != {"layers": {}})


def test_fuzzed_statuses_of_a_node() -> None:
    def check(data: bytes) -> None:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            return
        if not isinstance(found, dict):
            return
        try:
            taken = node_status(found)
        except ClusterError:
            return
        for model in taken.get("models", ()):
            assert int(model["total_bytes"]) >= int(model["fetched_bytes"]) - 10**18
            assert hash(model["url"])
        for item in taken.get("instances", ()):
            assert float(item["age_s"]) >= 0
            assert hash(item["id"] + item["model"] + item["state"])

    fuzz(st.binary(max_size=20), check, [json.dumps(STATUS).encode()])


def test_fuzzed_arguments_of_operations(run: Run) -> None:
    """Whatever a caller sends is answered, or refused with one error."""
    arguments = {"name": "m", "url": MODEL, "min": 0, "max": 1, "ttft_slo_s": 1.0, "settings": {"max_concurrency": "8"},
                 "node": "a", "undo": True, "drain_s": 3, "gateway": "g", "loads": {"m": {"waiting": 0}}}  # fmt: skip
    operations = ("deploy", "remove", "scale", "drain", "report", "sources", "status", "routes", "join", "")
    seeds = [json.dumps({"op": name, "arguments": arguments}).encode() for name in operations]

    async def scenario(_: Net, cluster: Cluster) -> None:
        loop = asyncio.new_event_loop()

        def check(data: bytes) -> None:
            try:
                request = json.loads(data)
            except (ValueError, RecursionError):
                return
            if not isinstance(request, dict) or request.get("op") == "routes":
                return
            try:
                loop.run_until_complete(cluster.answer(request))
            except MedusaError:
                pass

        try:
            await asyncio.to_thread(fuzz, st.binary(max_size=20), check, seeds)
        finally:
            loop.close()

    run(scenario, "a")


@pytest.mark.parametrize(
    "lie",
    [
        {"failed_fetches": []},
        {"failed_fetches": None},
        {"failed_fetches": {MODEL: 1}},
        {
            "instances": [
                STATUS["instances"][0] | {"group": {"id": "g", "rank": 0, "full": True, "size": 2, "keep": "x"}}
            ]
        },
    ],
)
def test_what_decisions_read_of_a_status_is_checked(lie: dict[str, Any]) -> None:
    node_status(STATUS)
    with pytest.raises(ClusterError, match="expected the status of a node"):
        node_status(STATUS | lie)


@pytest.mark.parametrize("port", [None, [], {}, {"port": "9"}])
@pytest.mark.parametrize("wanted", [{"live_scaling": True}, {"ttft_slo_s": 2.0}])
def test_a_node_that_names_no_port_for_a_group_holds_up_no_start(run: Run, port: Any, wanted: dict[str, Any]) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        async def answer(_: Any) -> Any:
            return port

        for node in net.nodes.values():
            node.group_port = answer  # type: ignore[method-assign]
            node.arrives = True
        await ask(cluster, "deploy", name="m", url=MODEL, max=1, **wanted)
        await until_async(lambda: cluster.models.get(MODEL))
        await ask(cluster, "report", gateway="g", url=None, loads={"m": {"waiting": 1}})
        await until_async(lambda: any(event["kind"] == "start-failed" for event in cluster.state.events))

    run(scenario, "a", "b", "c", "d")


def test_a_group_that_does_not_say_how_many_are_left_of_it_stops_no_decision(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await ask(cluster, "deploy", name="m", url=MODEL)
        group: dict[str, Any] = {"id": "g", "rank": 0, "full": True, "size": 2, "state": "serving"}
        shown = {"id": "i", "model": "m", "state": "ready", "age_s": 0.0, "group": group}
        net.nodes["a"].instances = {"i": shown}
        await until_async(lambda: "i" in cluster.state.instances)
        net.nodes["a"].instances = {"i": shown | {"group": group | {"state": "consolidated"}}}
        await until_async(lambda: "i" not in cluster.state.instances or cluster.state.instances["i"].group is None)
        await ask(cluster, "deploy", name="n", url=MODEL + "-2", min=1)
        await until_async(lambda: any(item.model == "n" for item in cluster.state.instances.values()))

    run(scenario, "a", "b")
