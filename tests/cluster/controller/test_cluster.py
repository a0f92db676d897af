"""What the controller's core does with what it is asked and what its nodes say."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_cluster.controller import cluster as cluster_module
from medusa_cluster.controller import members
from medusa_cluster.controller.cluster import Cluster
from medusa_cluster.policy.decide import Options
from medusa_cluster.policy.state import Fetch, Pin
from medusa_runtime.errors import ConfigError, NoControllerError, UnknownNameError
from waiting import until_async

from .conftest import Net

Run = Callable[..., None]
MODEL = "http://store/model"


async def ask(cluster: Cluster, operation: str, **arguments: Any) -> Any:
    return await cluster.answer({"op": operation, "arguments": arguments})


async def deploy(cluster: Cluster, **fields: Any) -> Any:
    return await ask(cluster, "deploy", **{"name": "m", "url": MODEL} | fields)


def instances(cluster: Cluster, model: str = "m") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cluster.state.routes.current["models"][model]["instances"]
    return found


def ready(cluster: Cluster) -> list[str]:
    return [item["id"] for item in instances(cluster) if item["state"] == "ready"]


def kinds(cluster: Cluster) -> list[str]:
    return [event["kind"] for event in cluster.state.events]


def test_a_request_starts_an_instance_within_its_own_report(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_LONG_TICK_S", math.inf)  # however busy this machine is

    async def scenario(net: Net, cluster: Cluster) -> None:
        await deploy(cluster)
        net.nodes["a"].starts = asyncio.Event()
        routes = await ask(cluster, "report", gateway="g", url="http://g", loads={"m": {"waiting": 1}})
        (starting,) = routes["models"]["m"]["instances"]
        assert starting["state"] == "starting"
        waiting = asyncio.create_task(ask(cluster, "routes", version=routes["version"], wait_s=10))
        net.nodes["a"].starts.set()
        (found,) = (await waiting)["models"]["m"]["instances"]
        url = f"http://a:8114/instances/{found['id']}"
        revision = cluster.state.deployments["m"].digest
        assert found == {"id": starting["id"], "node": "a", "url": url, "state": "ready", "revision": revision}
        again = await ask(cluster, "report", gateway="g", url="http://g", loads={"m": {"waiting": 1}})
        assert len(again["models"]["m"]["instances"]) == 1
        same = await ask(cluster, "report", gateway="g", url="http://g", loads={}, version=again["version"])
        assert same == {"version": cluster.state.routes.version}

    run(scenario, "a")


def test_a_model_starts_on_the_kind_of_device_that_it_needs(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        net.nodes["b"].device_kind = "h100"
        await until_async(lambda: cluster.state.nodes["b"].status.get("device_kind") == "h100")
        await deploy(cluster, min=1, max=3, device_kind="h100")
        await until_async(lambda: len(ready(cluster)) == 1)
        await ask(cluster, "report", gateway="g", url="http://g", loads={"m": {"waiting": 100}})
        assert {item["node"] for item in instances(cluster)} == {"b"}
        with pytest.raises(ConfigError, match="device_kind: expected up to 64 letters"):
            await deploy(cluster, device_kind="a kind")

    run(scenario, "a", "b", "c")


def test_routes_wait_no_longer_than_they_were_told(run: Run) -> None:
    async def scenario(_: Net, cluster: Cluster) -> None:
        await deploy(cluster)
        await until_async(lambda: cluster.state.routes.current["models"])
        version = cluster.state.routes.version
        assert (await ask(cluster, "routes", version=version, wait_s=0.05))["version"] == version
        assert (await ask(cluster, "routes", version="another", wait_s=30))["version"] == version

    run(scenario, "a")


def test_a_model_that_is_removed_leaves_its_nodes(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await deploy(cluster, min=2, max=2)
        await until_async(lambda: len(ready(cluster)) == 2)
        await ask(cluster, "report", gateway="g", url=None, loads={"m": {"waiting": 1}})
        await ask(cluster, "remove", name="m")
        await until_async(lambda: not any(node.instances for node in net.nodes.values()))
        assert cluster.state.routes.current["models"] == {}
        await deploy(cluster)
        await asyncio.sleep(0.5)
        assert instances(cluster) == [], "the load was that of the model which was removed"

    run(scenario, "a", "b")


def test_another_model_under_the_same_name_replaces_the_instances(run: Run) -> None:
    async def scenario(_: Net, cluster: Cluster) -> None:
        await deploy(cluster, min=1)
        (before,) = await until_async(lambda: ready(cluster))
        await deploy(cluster, min=1, url="http://store/other")
        (after,) = await until_async(lambda: [name for name in ready(cluster) if name != before])
        assert cluster.state.instances[after].model == "m"

    run(scenario, "a", "b")


def test_bad_arguments_are_named(run: Run) -> None:
    async def scenario(_: Net, cluster: Cluster) -> None:
        for fields, said in (
            ({"min": 2, "max": 1}, "min up to max"),
            ({"max": "many"}, "max: expected a number"),
            ({"name": "a/b"}, "name: expected"),
            ({"url": "relative/../.."}, ""),
            ({"settings": {"nothing": "1"}}, "settings: expected an option of medusa serve"),
            ({"settings": {"max_concurrency": "0"}}, "settings: max_concurrency"),
            ({"settings": {"token": "x"}}, "settings: token is chosen for each instance"),
            ({"settings": {"port": "1"}}, "settings: port is chosen for each instance"),
            ({"ttft_slo_s": -1}, "ttft_slo_s"),
            ({"weight": 0}, "weight: expected a number from 0.01 to 100, found 0"),
            ({"what": 1}, "a deployment has no what"),
        ):
            if said:
                with pytest.raises(ConfigError, match=said):
                    await deploy(cluster, **fields)
        with pytest.raises(UnknownNameError, match="no model is deployed as 'x'; expected one of none"):
            await ask(cluster, "scale", name="x", min=1)
        with pytest.raises(UnknownNameError, match="expected one of a"):
            await ask(cluster, "drain", node="x")
        with pytest.raises(UnknownNameError, match="no node is called 'x'"):
            await ask(cluster, "logs", node="x")
        for operation, arguments in (
            ("report", {"gateway": "g", "loads": 3}),
            ("scale", {}),
            ("what", {}),
            ("logs", {}),
            ("logs", {"node": "a", "log": "agent", "after": "many"}),
        ):
            with pytest.raises(ConfigError):
                await ask(cluster, operation, **arguments)

    run(scenario, "a")


def test_each_model_and_each_adapter_has_a_name_of_its_own(run: Run) -> None:
    async def scenario(_: Net, cluster: Cluster) -> None:
        adapters = {"settings": {"lora_modules": "sql=/sql,german=/german"}}
        for _ in range(2):
            await deploy(cluster, name="m", **adapters)
        taken: tuple[tuple[str, dict[str, Any]], ...] = (
            ("sql", {}), ("other", adapters), ("own", {"settings": {"lora_modules": "own=/own"}}),
        )  # fmt: skip
        for name, fields in taken:
            with pytest.raises(ConfigError, match="a name of its own for each model and adapter, found another"):
                await deploy(cluster, name=name, **fields)
        assert list(cluster.state.deployments) == ["m"]
        await deploy(cluster, name="m")
        await deploy(cluster, name="sql")

    run(scenario, "a")


def test_a_start_that_fails_is_tried_again_later_and_told(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        net.nodes["a"].refuses = "no such checkpoint"
        await deploy(cluster, min=1)
        await until_async(lambda: "start-failed" in kinds(cluster))
        assert instances(cluster) == []
        assert "no such checkpoint" in next(e["text"] for e in cluster.state.events if e["kind"] == "start-failed")
        net.nodes["a"].refuses = None
        await until_async(lambda: ready(cluster))

    run(scenario, "a")


def test_a_fetch_that_fails_is_told_and_tried_again_later(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        node = net.nodes["a"]
        node.store_is_away = True
        await deploy(cluster)
        await until_async(lambda: "fetch-failed" in kinds(cluster))
        assert "Storage.Unreachable" in next(e["text"] for e in cluster.state.events if e["kind"] == "fetch-failed")
        await asyncio.sleep(2)
        assert sum(call["op"] == "fetch" for call in node.calls) <= 2
        node.store_is_away = False
        await until_async(lambda: MODEL in node.models)

    run(scenario, "a")


def test_an_instance_that_died_is_replaced(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await deploy(cluster, min=1)
        (before,) = await until_async(lambda: ready(cluster))
        await until_async(lambda: cluster.state.instances[before].confirmed)
        net.nodes["a"].instances[before] |= {"state": "failed", "failure": "signal 9"}
        await until_async(lambda: [name for name in ready(cluster) if name != before])
        assert kinds(cluster).count("instance-died") == 1

    run(scenario, "a")


def test_what_a_node_had_is_elsewhere_after_its_death(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await deploy(cluster, min=1)
        await until_async(lambda: ready(cluster))
        node = instances(cluster)[0]["node"]
        (other,) = {"a", "b"} - {node}
        net.listed.discard(node)
        net.cut.add(node)
        await until_async(lambda: any(i["node"] == other and i["state"] == "ready" for i in instances(cluster)))
        assert await until_async(lambda: MODEL in net.nodes[other].models)
        assert next(item for item in (await ask(cluster, "status"))["nodes"] if item["name"] == node)["state"] == "lost"
        # It comes back, with the instance that it had: one of the two goes.
        net.listed.add(node)
        net.cut.discard(node)
        await until_async(lambda: "node-back" in kinds(cluster))

    run(scenario, "a", "b")


def test_a_node_that_serves_but_cannot_be_told_anything_keeps_its_requests(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "_SILENT_AFTER_S", 0.3)

    async def scenario(net: Net, cluster: Cluster) -> None:
        await deploy(cluster, min=1, max=2)
        (before,) = await until_async(lambda: ready(cluster))
        node = instances(cluster)[0]["node"]
        net.listed.discard(node)
        net.cut.add(node)
        net.serving.add(node)
        await until_async(lambda: "node-silent" in kinds(cluster))
        assert before in ready(cluster)
        await until_async(lambda: len(ready(cluster)) == 2)  # another one that can be told something

    run(scenario, "a", "b")


def test_a_drained_node_has_nothing_left(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await deploy(cluster, min=1)
        await until_async(lambda: ready(cluster))
        node = instances(cluster)[0]["node"]
        (other,) = {"a", "b"} - {node}
        with pytest.raises(ConfigError, match="drain_s: expected seconds from 0"):
            await ask(cluster, "drain", node=node, drain_s=-1)
        assert (await ask(cluster, "drain", node=node, drain_s=7))["state"] == "draining"
        assert instances(cluster)[0]["state"] == "draining"
        await until_async(lambda: cluster.state.node_state(cluster.state.nodes[node]) == "drained")
        assert {item["node"] for item in instances(cluster)} == {other}
        assert MODEL in net.nodes[other].models
        assert [request["drain_s"] for request in net.nodes[node].calls if request["op"] == "stop"] == [7]

    run(scenario, "a", "b")


def test_a_node_that_ends_by_itself_gets_nothing_new(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await deploy(cluster, min=1)
        await until_async(lambda: ready(cluster))
        node = instances(cluster)[0]["node"]
        net.nodes[node].state = "draining"
        await until_async(lambda: [item for item in instances(cluster) if item["node"] != node])

    run(scenario, "a", "b")


def test_a_controller_that_starts_again_finds_everything(run: Run, tmp_path: Path) -> None:
    net = Net(tmp_path, ("a", "b"))
    known: list[str] = []

    async def first(_: Net, cluster: Cluster) -> None:
        await deploy(cluster, min=1, max=2, settings={"max_concurrency": "3"})
        known.extend(await until_async(lambda: ready(cluster)))
        await ask(cluster, "drain", node="b", drain_s=2.5)

    async def second(net: Net, cluster: Cluster) -> None:
        await until_async(lambda: ready(cluster))
        assert ready(cluster) == known
        assert cluster.state.deployments["m"].settings == {"max_concurrency": "3"}
        assert cluster.state.draining == {"b": 2.5}
        await asyncio.sleep(1)  # some ticks
        assert ready(cluster) == known
        assert sum(request["op"] == "start" for node in net.nodes.values() for request in node.calls) == 1

    run(first, net=net)
    run(second, net=net)


def test_routes_are_not_given_before_the_nodes_have_answered(tmp_path: Path) -> None:
    async def body() -> None:
        cluster = Cluster(Net(tmp_path, ("a",)), tmp_path / "controller.json")
        for operation in ("routes", "report"):
            with pytest.raises(NoControllerError):
                await ask(cluster, operation, gateway="g", loads={}, version="", wait_s=0)
        assert (await ask(cluster, "status"))["nodes"] == []

    asyncio.run(body())


def test_copies_follow_the_newest_version(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await deploy(cluster, min=2, max=2)
        await until_async(lambda: all(MODEL in node.models for node in net.nodes.values()))
        await until_async(lambda: cluster.state.newest_version(MODEL) == "v1")
        net.nodes["b"].models[MODEL]["version"] = net.nodes["b"].version = "v2"  # its agent has fetched anew
        net.nodes["a"].version = "v2"
        await until_async(lambda: cluster.state.newest_version(MODEL) == "v2")
        await ask(cluster, "drain", node="b")
        fetch = await until_async(
            lambda: [call for call in net.nodes["a"].calls if call["op"] == "fetch" and call["version"] == "v2"]
        )
        assert fetch[0]["sources"] == ["http://b:8114"]

    run(scenario, "a", "b")


def test_a_model_that_was_replaced_in_the_store_is_rolled_out(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await deploy(cluster, min=1)
        (before,) = await until_async(lambda: ready(cluster))
        await until_async(lambda: cluster.state.instances[before].version == "v1")
        (holder,) = [node for node in net.nodes.values() if MODEL in node.models][:1]
        for node in net.nodes.values():
            node.version = "v2"
        holder.models[MODEL]["version"] = "v2"  # its agent has looked at the store, and fetched anew
        await until_async(lambda: [item for item in ready(cluster) if cluster.state.instances[item].version == "v2"])
        await until_async(lambda: before not in cluster.state.instances)
        (after,) = ready(cluster)
        assert cluster.state.instances[after].version == "v2"
        ended = [event["text"] for event in cluster.state.events if event["kind"] == "scale-down"]
        assert ended == [f"{before} ends: its model was replaced in the store"]

    run(scenario, "a", "b")


def test_nodes_hear_who_has_a_model(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await deploy(cluster, min=1)
        await until_async(lambda: any(node.models for node in cluster.state.nodes.values() if node.models()))
        holder = next(name for name, node in net.nodes.items() if node.models)
        await until_async(lambda: cluster.state.nodes[holder].models())
        (other,) = {"a", "b"} - {holder}
        assert await ask(cluster, "sources", node=other, url=MODEL) == [f"http://{holder}:8114"]
        assert await ask(cluster, "sources", node=holder, url=MODEL) == []
        assert await ask(cluster, "sources", node=other, url="http://store/nothing") == []

    run(scenario, "a", "b")


def test_nodes_that_have_lost_their_copies_read_from_each_other(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await deploy(cluster, min=3, max=3)
        await until_async(lambda: len(ready(cluster)) == 3 and not cluster.execution.fetches(0.0))
        for node in net.nodes.values():  # behind the controller's back; instances fetch by themselves
            node.models.clear()
        await until_async(lambda: not any(node.models() for node in cluster.state.nodes.values()))
        assert await ask(cluster, "sources", node="b", url=MODEL) == []
        assert await ask(cluster, "sources", node="a", url=MODEL) == ["http://b:8114"]
        assert await ask(cluster, "sources", node="c", url=MODEL) == ["http://a:8114", "http://b:8114"]
        assert await ask(cluster, "sources", node="b", url=MODEL) == []
        assert await ask(cluster, "sources", node="c", url="http://store/other") == []

    run(scenario, "a", "b", "c")


def test_a_copy_that_a_node_has_just_lost_is_not_taken_for_a_fetch_that_has_ended(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await deploy(cluster, min=2, max=2)
        await until_async(lambda: len(ready(cluster)) == 2 and not cluster.execution.fetches(0.0))
        assert await ask(cluster, "sources", node="a", url=MODEL) == ["http://b:8114"]
        cluster._tick()  # with the status of before
        assert await ask(cluster, "sources", node="b", url=MODEL) == []  # or each would wait for the other
        assert [fetch.sources for fetch in cluster.execution.fetches(0.0)] == [("b",), ()]

    run(scenario, "a", "b")


def test_a_pin_does_not_begin_the_fetch_of_a_worker_whose_layers_come_first(run: Run) -> None:
    """Its group orders the fetch a moment later. One without layers would hold the worker's own back."""

    async def scenario(net: Net, cluster: Cluster) -> None:
        cluster.execution.begin(Fetch("a", MODEL, (), layers=(0, 2)))
        cluster.execution.begin(Pin("a", MODEL))
        cluster.execution.begin(Fetch("b", MODEL, ()))
        cluster.execution.begin(Pin("b", MODEL))
        await until_async(lambda: any(call.get("pin") for call in net.nodes["b"].calls))
        assert not net.nodes["a"].calls

    run(scenario, "a", "b")


def test_a_pin_leaves_the_plan_of_a_fetch_alone(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await deploy(cluster, min=1)
        await until_async(lambda: ready(cluster))
        cluster.execution.begin(Pin("a", MODEL, pinned=True))
        orders = net.nodes["a"].calls
        await until_async(lambda: [call for call in orders if call["op"] == "fetch" and call["sources"] is None])

    run(scenario, "a")


def test_a_peer_that_sends_wrong_bytes_is_named(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await deploy(cluster, min=1)
        holder = await until_async(lambda: next((node for node in net.nodes.values() if node.models), None))
        (other,) = {"a", "b"} - {holder.name}
        holder.models[MODEL]["excluded"] = {f"http://{other}:8114": "Storage.WrongBytes"}
        await until_async(lambda: "peer-excluded" in kinds(cluster))
        event = next(event for event in cluster.state.events if event["kind"] == "peer-excluded")
        assert event["node"] == other
        await asyncio.sleep(0.6)
        assert kinds(cluster).count("peer-excluded") == 1

    run(scenario, "a", "b")


def test_more_nodes_are_asked_for_when_instances_lack_room(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await deploy(cluster, min=3, max=3)
        await until_async(lambda: net.requested[-1:] == [3])
        await ask(cluster, "scale", name="m", min=0)
        await until_async(lambda: net.requested[-2:] == [3, 0])

    run(scenario, "a")


def test_a_wish_for_nodes_is_repeated_until_it_arrives_and_an_earlier_one_withdrawn(run: Run, tmp_path: Path) -> None:
    net = Net(tmp_path, ("a",))
    net.refusals = 2

    async def scenario(_: Net, cluster: Cluster) -> None:
        await until_async(lambda: net.requested)
        assert net.refusals == 0

    run(scenario, net=net)
    assert net.requested == [0]  # an earlier controller may have asked for more


def test_a_node_without_work_is_let_go_and_used_again(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await deploy(cluster, min=2, max=2)
        await until_async(lambda: len(ready(cluster)) == 2)
        await ask(cluster, "scale", name="m", min=1, max=1)
        await until_async(lambda: "node-spare" in kinds(cluster))
        (spare,) = (name for name, node in cluster.state.nodes.items() if node.spare)
        await until_async(lambda: spare in net.forgotten)  # Ray's autoscaler ends no node with an actor
        assert cluster.state.node_state(cluster.state.nodes[spare]) == "drained"
        calls = len(net.nodes[spare].calls)
        await asyncio.sleep(1.5)
        assert not [call for call in net.nodes[spare].calls[calls:] if call["op"] != "status"]
        await ask(cluster, "scale", name="m", min=2, max=2)
        await until_async(lambda: len(ready(cluster)) == 2)
        assert cluster.state.node_state(cluster.state.nodes[spare]) == "alive"
        assert "node-used" in kinds(cluster)

    run(scenario, "a", "b", options=Options(least_nodes=1, spare_after_s=0.2))


def test_a_node_that_answers_no_more_is_lost_though_ray_lists_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_LOST_AFTER_S", 0.4)

    async def scenario(net: Net, cluster: Cluster) -> None:
        await deploy(cluster, min=1)
        await until_async(lambda: ready(cluster))
        node = instances(cluster)[0]["node"]
        net.cut.add(node)
        await until_async(lambda: "node-lost" in kinds(cluster))
        await until_async(lambda: any(i["node"] != node and i["state"] == "ready" for i in instances(cluster)))
        # Its server answers again, but orders do not reach it yet: its instance serves.
        net.serving.add(node)
        await until_async(lambda: "node-back" in kinds(cluster))
        assert cluster.state.node_state(cluster.state.nodes[node]) == "silent"
        assert node in {item["node"] for item in instances(cluster)}
        net.cut.discard(node)
        await until_async(lambda: cluster.state.node_state(cluster.state.nodes[node]) == "alive")

    run(scenario, "a", "b")
