"""Outages that last for hours, or come in the middle of an order: what is known and decided goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_cluster.controller import members
from medusa_cluster.controller.cluster import Cluster
from medusa_cluster.controller.nodes import KnownInstance
from medusa_cluster.policy.decide import Options
from medusa_cluster.policy.state import StopInstance
from medusa_runtime.errors import ClusterError
from waiting import until_async

from .conftest import Net

Run = Callable[..., None]
MODEL = "http://store/model"


async def ask(cluster: Cluster, operation: str, **arguments: Any) -> Any:
    return await cluster.answer({"op": operation, "arguments": arguments})


def ready(cluster: Cluster) -> list[str]:
    instances = cluster.state.routes.current["models"]["m"]["instances"]
    return [item["id"] for item in instances if item["state"] == "ready"]


def test_a_model_and_a_fetch_may_fail_for_days(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        for number in range(1100):
            known = KnownInstance(f"i{number}", "m", "a", "starting", time.time())
            cluster.state.instances[known.id] = known
            assert cluster.execution.note_failed(known.id, "killed")
            del cluster.state.instances[known.id]
        execution: Any = cluster.execution
        for _ in range(1100):
            execution._fetch_failed(("a", MODEL), "the store is away", time.monotonic())

    run(scenario, "a")


def test_a_full_disk_blinds_the_controller_to_no_node(run: Run, tmp_path: Path) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await ask(cluster, "deploy", name="m", url=MODEL)
        net.nodes["a"].version = "v9"
        blocker = tmp_path / "controller.new"
        blocker.mkdir()  # the plan cannot be written
        net.nodes["a"].models[MODEL] = {
            "url": MODEL, "state": "done", "fetched_bytes": 1, "total_bytes": 1, "idle_s": 0, "pinned": False,
            "version": "v9",
        }  # fmt: skip
        await until_async(lambda: cluster.state.nodes["a"].models())
        net.nodes["a"].state = "draining"
        await until_async(lambda: cluster.state.nodes["a"].status["state"] == "draining")
        blocker.rmdir()
        await until_async(lambda: "v9" in (tmp_path / "controller.json").read_text())

    run(scenario, "a")


def test_what_could_not_be_saved_is_as_it_was(run: Run, tmp_path: Path) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await ask(cluster, "deploy", name="m", url=MODEL, min=1)
        await until_async(lambda: [item for item in cluster.state.instances.values() if item.state == "ready"])
        (tmp_path / "controller.new").mkdir()
        for operation, arguments in (
            ("deploy", {"name": "m", "url": MODEL, "min": 1, "settings": {"threads": "1"}}),
            ("scale", {"name": "m", "max": 7}),
            ("remove", {"name": "m"}),
            ("drain", {"node": "a"}),
        ):
            with pytest.raises(ClusterError, match="could not be written"):
                await ask(cluster, operation, **arguments)
            assert (cluster.state.deployments["m"].settings, cluster.state.deployments["m"].max) == ({}, 1), operation
            assert not cluster.state.draining
        (tmp_path / "controller.new").rmdir()
        (old,) = cluster.state.instances
        await ask(cluster, "deploy", name="m", url=MODEL, min=1, settings={"threads": "1"})
        await until_async(lambda: old not in cluster.state.instances)

    run(scenario, "a")


def test_an_instance_whose_stop_did_not_reach_its_node_is_known_again(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await ask(cluster, "deploy", name="m", url=MODEL, min=1)
        await until_async(
            lambda: [item for item in cluster.state.instances.values() if item.state == "ready" and item.confirmed]
        )
        (known,) = cluster.state.instances.values()
        net.cut.add(known.node)
        cluster.execution.begin(StopInstance(known.id, known.node, 0.0))
        await until_async(lambda: cluster.state.nodes[known.node].lost_at is not None)
        await until_async(lambda: not cluster.execution.busy_with(known.id))
        net.cut.clear()
        await until_async(lambda: cluster.state.nodes[known.node].lost_at is None)
        await until_async(
            lambda: known.id in cluster.state.instances or known.id not in net.nodes[known.node].instances
        )

    run(scenario, "a")


def test_an_instance_that_drains_goes_on_when_the_load_needs_it_again(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await ask(cluster, "deploy", name="m", url=MODEL, min=1)
        await until_async(
            lambda: [item for item in cluster.state.instances.values() if item.state == "ready" and item.confirmed]
        )
        (known,) = cluster.state.instances.values()
        node = net.nodes[known.node]
        node.busy.add(known.id)
        node.instances[known.id]["running"] = 1
        await until_async(lambda: known.running == 1)
        cluster.execution.begin(StopInstance(known.id, known.node, 30.0))
        assert known.state == "draining"
        await until_async(lambda: known.state == "ready" and not cluster.execution.busy_with(known.id))
        assert cluster.state.instances == {known.id: known}
        assert [call["op"] for call in node.calls].count("start") == 1
        node.busy.clear()
        cluster.execution.begin(StopInstance(known.id, known.node, 30.0))
        await until_async(lambda: known.id not in cluster.state.instances)

    run(scenario, "a")


def test_an_instance_that_is_ended_before_its_node_was_told_is_not_started(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        dropped = asyncio.Event()

        async def drop(_: Any) -> None:
            await dropped.wait()

        cluster.execution.start_task(("drop", "a", "http://store/other"), drop(None))
        await ask(cluster, "deploy", name="m", url=MODEL, min=1)
        await until_async(lambda: cluster.state.instances)
        (old,) = cluster.state.instances
        await ask(cluster, "deploy", name="m", url=MODEL, min=1, settings={"threads": "1"})
        await until_async(lambda: old not in cluster.state.instances)
        dropped.set()
        await until_async(lambda: net.nodes["a"].instances)
        await asyncio.sleep(0.5)
        assert old not in net.nodes["a"].instances

    run(scenario, "a")


@pytest.mark.parametrize("change", [{"url": MODEL + "/other"}, {"settings": {"threads": "1"}}], ids=["url", "settings"])
def test_an_instance_of_what_was_deployed_before_serves_no_more_when_its_node_comes_back(
    run: Run, change: dict[str, Any]
) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await ask(cluster, "deploy", name="m", url=MODEL, min=1)
        await until_async(lambda: ready(cluster))
        (old,) = cluster.state.instances.values()
        net.cut.add(old.node)
        await until_async(lambda: old.id not in cluster.state.instances)
        await ask(cluster, "deploy", **{"name": "m", "url": MODEL, "min": 1} | change)
        await until_async(lambda: cluster.state.has_answered("m"))
        net.cut.clear()
        while old.id in net.nodes[old.node].instances:
            assert old.id not in ready(cluster)
            await asyncio.sleep(0.01)
        assert ready(cluster)

    run(scenario, "a", "b")


def test_a_controller_that_starts_again_ends_instances_of_what_was_deployed_before(run: Run, tmp_path: Path) -> None:
    """Also where none of what has replaced them runs any more."""
    net = Net(tmp_path, ("a", "b"))
    old: list[str] = []

    async def first(net: Net, cluster: Cluster) -> None:
        await ask(cluster, "deploy", name="m", url=MODEL, min=1)
        old.extend(await until_async(lambda: ready(cluster)))
        net.cut.add(cluster.state.instances[old[0]].node)
        await until_async(lambda: old[0] not in cluster.state.instances)
        await ask(cluster, "deploy", name="m", url=MODEL + "/other", min=1)
        await until_async(lambda: cluster.state.has_answered("m"))
        await asyncio.sleep(0.5)  # the plan is written
        net.cut.update(net.nodes)

    async def second(net: Net, cluster: Cluster) -> None:
        nodes = net.nodes.values()
        while any(old[0] in node.instances for node in nodes):
            assert old[0] not in ready(cluster)
            await asyncio.sleep(0.01)
        await until_async(lambda: ready(cluster))

    run(first, net=net)
    (node,) = [node for node in net.nodes.values() if old[0] in node.instances]
    net.cut.clear()
    for other in net.nodes.values():
        if other is not node:
            other.instances.clear()
    run(second, net=net)


@pytest.mark.parametrize("change", [{"url": MODEL + "/other"}, {"settings": {"threads": "1"}}], ids=["url", "settings"])
def test_an_instance_of_what_was_deployed_before_does_not_go_on_for_the_load(run: Run, change: dict[str, Any]) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        net.nodes["a"].version = ""  # as of a model on a disk
        await ask(cluster, "deploy", name="m", url=MODEL, min=1)
        await until_async(lambda: ready(cluster))
        (old,) = cluster.state.instances.values()
        node = net.nodes["a"]
        node.busy.add(old.id)
        node.instances[old.id]["running"] = 1
        await until_async(lambda: old.running == 1)
        await ask(cluster, "deploy", **{"name": "m", "url": MODEL, "min": 1} | change)
        await asyncio.sleep(1)  # some ticks
        assert old.state == "draining"
        assert [call["op"] for call in node.calls].count("resume") == 0
        node.busy.clear()
        node.instances.pop(old.id)
        node.resumed.set()

    run(scenario, "a")


def test_a_refused_drain_is_no_event(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        with pytest.raises(Exception, match="drain_s"):
            await ask(cluster, "drain", node="a", drain_s=-1)
        assert not [event for event in cluster.state.events if event["kind"] == "draining"]

    run(scenario, "a")


def test_an_instance_that_has_served_before_the_controller_started_is_started_again_at_once(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        for name, lasted_s in (("new", 1.0), ("old", 3600.0)):
            net.nodes["a"].instances[name] = {"id": name, "model": "m", "state": "ready", "age_s": lasted_s}
        await until_async(lambda: {"new", "old"} <= cluster.state.instances.keys())
        execution: Any = cluster.execution
        for name, failures in (("old", 0), ("new", 1)):
            assert execution.note_failed(name, "killed")
            assert execution._failures["m"][0] == failures, name

    run(scenario, "a")


def test_a_node_that_is_back_as_it_was_is_in_the_routes_again(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        await ask(cluster, "deploy", name="m", url=MODEL, min=1)
        await until_async(lambda: [item["state"] for item in routed(cluster)] == ["ready"])
        (instance,), before = cluster.state.instances.values(), routed(cluster)
        await until_async(lambda: instance.confirmed)  # by the node's status, in which it is from now on
        node = cluster.state.nodes["a"]
        cluster.state.lose_node(node)
        assert not routed(cluster)
        cluster._apply_status(node)
        assert routed(cluster) == before

    def routed(cluster: Cluster) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = cluster.state.routes.current["models"]["m"]["instances"]
        return found

    run(scenario, "a")


def test_nothing_is_kept_of_a_node_that_was_lost_for_long(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        execution: Any = cluster.execution
        execution._fetch_failed(("b", MODEL), "the store is away", time.monotonic())
        net.listed.discard("b")
        net.cut.add("b")
        await until_async(lambda: "b" in net.forgotten)
        monkeypatch.setattr(members, "FORGET_LOST_S", 0.0)
        await until_async(lambda: "b" not in cluster.state.nodes)
        await ask(cluster, "deploy", name="m", url=MODEL)
        execution._fetch_failed(("a", MODEL), "the store is away", time.monotonic())
        assert set(execution._failed_fetches) == {("a", MODEL)}
        known: Any = cluster._members
        assert set(known._urls) == {"a"}
        assert not known._forgetting

    monkeypatch.setattr(members, "_GIVE_UP_S", 0.0)
    run(scenario, "a", "b")


def test_a_start_that_fails_in_an_unforeseen_way_is_tried_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        failed: list[str] = []
        reached = net.call

        async def call(node: str, request: dict[str, Any], timeout_s: float) -> Any:
            if request["op"] == "start" and not failed:
                failed.append(request["id"])
                raise ValueError("no error of ours")
            return await reached(node, request, timeout_s)

        monkeypatch.setattr(net, "call", call)
        await ask(cluster, "deploy", name="m", url=MODEL, min=1)
        await until_async(lambda: [item for item in cluster.state.instances.values() if item.state == "ready"])
        assert failed
        assert failed[0] not in cluster.state.instances
        assert "start-failed" in [event["kind"] for event in cluster.state.events]

    run(scenario, "a")


def test_a_stop_that_fails_in_an_unforeseen_way_is_tried_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        answers: list[Any] = [None, "nonsense"]
        reached = net.call

        async def call(node: str, request: dict[str, Any], timeout_s: float) -> Any:
            if request["op"] == "stop" and answers:
                return answers.pop()
            return await reached(node, request, timeout_s)

        monkeypatch.setattr(net, "call", call)
        await ask(cluster, "deploy", name="m", url=MODEL, min=1)
        await until_async(lambda: [item for item in cluster.state.instances.values() if item.state == "ready"])
        await ask(cluster, "remove", name="m")
        await until_async(lambda: not cluster.state.instances)
        assert not net.nodes["a"].instances

    run(scenario, "a")


def test_nothing_is_kept_of_a_model_that_was_removed(run: Run) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        loads: Any = cluster.state.loads
        models: Any = cluster.models
        await ask(cluster, "deploy", name="m", url=MODEL)
        await ask(cluster, "report", gateway="g", url=None, loads={"m": {"waiting": 1}}, version="")
        await until_async(lambda: "m" in loads._last_request and models.get(MODEL))
        execution: Any = cluster.execution
        execution._fetch_failed(("a", MODEL), "the store is away", time.monotonic())
        await until_async(lambda: "m" in cluster._memory.index.marks)
        await ask(cluster, "remove", name="m")
        await until_async(lambda: not cluster.state.instances)
        await ask(cluster, "deploy", name="another", url=MODEL + "-2")
        await ask(cluster, "status")
        await until_async(lambda: set(cluster._memory.index.marks) <= {"another"})
        execution._fetch_failed(("a", MODEL + "-2"), "the store is away", time.monotonic())
        assert set(execution._failed_fetches) == {("a", MODEL + "-2")}
        assert (
            loads._last_request,
            models._known.keys() - {MODEL + "-2"},
            models._attempts.keys() - {MODEL + "-2"},
        ) == (
            {},
            set(),
            set(),
        )

    run(scenario, "a")


def test_a_node_that_left_before_it_ever_answered_is_forgotten(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_LIST_S", 0.05)

    async def scenario(net: Net, cluster: Cluster) -> None:
        net.cut.add("b")
        net.listed.add("b")
        await until_async(lambda: "b" in cluster.state.nodes)
        net.listed.remove("b")
        await until_async(lambda: "b" not in cluster.state.nodes)
        await until_async(lambda: "b" in net.forgotten)
        assert "a" in cluster.state.nodes

    run(scenario, "a")


def test_a_controller_that_was_stopped_for_a_while_loses_no_node(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_LOST_AFTER_S", 0.2)
    monkeypatch.setattr(members, "_ANSWERS_WITHIN_S", 0.1)

    async def scenario(net: Net, cluster: Cluster) -> None:
        node = net.nodes["a"]
        node.answers = asyncio.Event()
        await until_async(lambda: node.asked)
        time.sleep(0.5)
        node.answers.set()
        await asyncio.sleep(0.5)
        assert all(event["kind"] != "node-lost" for event in cluster.state.events)

    run(scenario, "a")


def test_the_logs_of_a_node_are_asked_for(run: Run) -> None:
    async def scenario(_: Net, cluster: Cluster) -> None:
        assert await ask(cluster, "logs", node="a") == {"agent": 8}
        assert await ask(cluster, "logs", node="a", log="agent", after=7) == {
            "text": "agent of http://a:8114",
            "end": 7,
        }

    run(scenario, "a", "b")


def test_a_node_whose_actor_cannot_be_ended_is_followed_as_before(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises errors of many kinds while its GCS is away."""

    async def scenario(net: Net, cluster: Cluster) -> None:
        failed: list[str] = []
        forget = net.forget

        async def fails_first(node: str) -> None:
            if not failed:
                failed.append(node)
                raise RuntimeError("the GCS is away")
            await forget(node)

        monkeypatch.setattr(net, "forget", fails_first)
        await until_async(lambda: failed)
        await until_async(lambda: failed[0] in net.forgotten)
        await ask(cluster, "deploy", name="m", url=MODEL, min=2, max=2)
        await until_async(lambda: [item.state for item in cluster.state.instances.values()] == ["ready", "ready"])

    run(scenario, "a", "b", options=Options(least_nodes=1, spare_after_s=0.2))


def test_a_lost_node_whose_actor_could_not_be_ended_is_tried_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_GIVE_UP_S", 0.0)

    async def scenario(net: Net, cluster: Cluster) -> None:
        failures = ["twice", "once"]
        forget = net.forget

        async def fails_first(node: str) -> None:
            if failures:
                raise RuntimeError(failures.pop())
            await forget(node)

        monkeypatch.setattr(net, "forget", fails_first)
        net.listed.discard("b")
        net.cut.add("b")
        await until_async(lambda: "b" in net.forgotten)

    run(scenario, "a", "b")


def test_a_call_that_fails_in_an_unforeseen_way_ends_no_watch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(net: Net, cluster: Cluster) -> None:
        failing = {"status", "call"}

        def fail_once(name: str, inner: Any) -> None:
            async def call(*arguments: Any) -> Any:
                if name in failing:
                    failing.discard(name)
                    raise ValueError("no error of ours")
                return await inner(*arguments)

            monkeypatch.setattr(net, name, call)

        fail_once("status", net.status)
        fail_once("call", net.call)
        await until_async(lambda: not failing)
        net.cut.add("a")
        await until_async(lambda: cluster.state.nodes["a"].lost_at is not None)
        net.cut.discard("a")
        await until_async(lambda: cluster.state.node_state(cluster.state.nodes["a"]) == "alive")

    run(scenario, "a")
