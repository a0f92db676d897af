"""A controller forgets nodes that are gone, however many come and go."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

from medusa_cluster.controller import cluster as cluster_module
from medusa_cluster.controller import execution
from medusa_cluster.controller.cluster import Cluster
from medusa_cluster.controller.nodes import KnownInstance, KnownNode
from medusa_cluster.controller.plan_file import read_plan
from medusa_cluster.policy.state import Fetch, StopInstance
from medusa_runtime.errors import ClusterError, InstanceError

URL = "http://127.0.0.1/m"
BATCH, BATCHES = 100, 25
LOST_S = 4000.0  # after which the status shows a node no more


class Nodes:
    """Nodes that take every order, but start nothing. Their statuses come without being asked for."""

    async def servers(self) -> dict[str, str] | None:
        return {}

    async def status(self, node: str, url: str, timeout_s: float) -> Any:
        raise ClusterError(f"{node} does not answer")

    async def call(self, node: str, request: dict[str, Any], timeout_s: float) -> Any:
        if request["op"] == "describe":
            parts = {"total_bytes": 8 * 10**7, "entry": 0, "layers": [10**7] * 8, "exit": 0, "times": None}
            return parts | {"generates": True}
        if request["op"] == "start":
            raise InstanceError("there is no room")
        return {}

    def group_token(self, group: str) -> str:
        return group

    async def forget(self, node: str) -> None:
        pass

    async def request_nodes(self, total: int, gpus: Any = ()) -> None:
        pass


def status_of(name: str, number: int) -> dict[str, Any]:
    """Return the status of a node that serves, sends, has given up peers, and claims an instance of another node."""
    copy = {"url": URL, "state": "done", "fetched_bytes": 100, "total_bytes": 100, "pinned": True, "version": "v1"}
    arrives = {"url": URL + "2", "state": "fetching", "fetched_bytes": 1, "total_bytes": 100, "pinned": False}
    serves = {"model": "m", "state": "ready", "age_s": 1.0, "running": 1, "version": "v1"}
    return {
        "name": name,
        "address": f"{name}:8114",
        "url": f"http://{name}:8114",
        "state": "alive",
        "link_bytes_per_s": 1e8,
        "memory_bytes": 10**9,
        "memory_used_bytes": 100,
        "pace_bytes_per_s": 8.5e7 if number % 2 else None,
        "models": [copy, arrives | {"excluded": {f"peer of {name}": "it sends other bytes"}}],
        "instances": [serves | {"id": f"{name}-1"}, serves | {"id": f"n{number - number % BATCH}-1"}],
        "failed_fetches": {URL + "3": "Storage.Unreachable"},
    }


def sizes(root: object) -> Counter[str]:
    """Return how many items the containers have that an object of the cluster leads to, by the path to them."""
    found: Counter[str] = Counter()
    pending: list[tuple[str, Any]] = [("", root)]
    seen: set[int] = set()
    while pending:
        path, item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            found[path] += len(item)
            pending += [(f"{path}[]", value) for value in item.values()]
        elif isinstance(item, list | tuple | set | frozenset | deque):
            found[path] += len(item)
            pending += [(f"{path}[]", value) for value in item]
        elif type(item).__module__.startswith("medusa_cluster"):
            names = getattr(item, "__dict__", {}) or dict.fromkeys(getattr(item, "__slots__", ()))
            pending += [(f"{path}.{name}", getattr(item, name, None)) for name in names]
    return found


class CountedStatus(dict[str, Any]):
    """A node's status that counts how often somebody goes through its models."""

    reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.reads += key == "models"
        return super().get(key, default)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def come_and_go(cluster: Cluster, names: list[str]) -> None:
    members: Any = cluster._members
    members._take_list({name: f"http://{name}:8114" for name in names})
    for number, name in enumerate(names):
        node = cluster.state.nodes[name]
        members._reach(node)
        members._take_status(node, members._checked(node, status_of(name, int(name[1:]))))
        if number % 10 == 0:
            await cluster.answer({"op": "drain", "arguments": {"node": name}})
        if number % 3 == 0:
            await cluster.answer({"op": "sources", "arguments": {"node": name, "url": URL + "2"}})
    for _ in range(3):
        cluster._tick()
        await settle()
    gone: list[KnownNode] = [cluster.state.nodes[name] for name in names]
    for node in gone:
        members._lose(node)
    cluster._tick()
    await settle()
    for node in gone:
        assert node.lost_at is not None
        node.lost_at -= LOST_S
    members._take_list({})
    for _ in range(2):
        cluster._tick()
        await settle()


def test_nothing_is_left_of_thousands_of_nodes_that_came_and_went(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(execution, "_STOPPED_KEPT_S", 0.0)

    async def run() -> None:
        path = tmp_path / "controller.json"
        cluster = Cluster(Nodes(), path)
        cluster._began -= LOST_S
        for name, url in (("m", URL), ("m2", URL + "2"), ("m3", URL + "3")):
            await cluster.answer({"op": "deploy", "arguments": {"name": name, "url": url, "min": 1, "max": 8}})
        before: Counter[str] = Counter()
        for batch in range(BATCHES):
            await come_and_go(cluster, [f"n{number}" for number in range(batch * BATCH, (batch + 1) * BATCH)])
            if batch == 9:
                before = sizes(cluster)
        await cluster.execution.close()
        assert sizes(cluster) - before == Counter()
        members: Any = cluster._members
        members._take_list({"n1": "http://n1:8114"})
        members._take_status(cluster.state.nodes["n1"], members._checked(cluster.state.nodes["n1"], status_of("n1", 1)))
        assert read_plan(path).draining == {}

    asyncio.run(run())


def test_orders_to_fetch_do_not_go_through_all_copies_for_each_one(tmp_path: Path) -> None:
    async def run() -> None:
        cluster = Cluster(Nodes(), tmp_path / "controller.json")
        members: Any = cluster._members
        names = [f"n{number}" for number in range(BATCH)]
        members._take_list({name: f"http://{name}:8114" for name in names})
        statuses = [CountedStatus(status_of(name, number)) for number, name in enumerate(names)]
        for name, status in zip(names, statuses, strict=True):
            members._take_status(cluster.state.nodes[name], status)
        before = sum(status.reads for status in statuses)
        for name in names:
            cluster.execution.begin(Fetch(name, URL + "4", sources=("n1",)))
        assert len(cluster.execution.fetches(time.monotonic())) == BATCH
        assert sum(status.reads for status in statuses) - before <= BATCH
        await cluster.execution.close()

    asyncio.run(run())


class CountedInstance(KnownInstance):
    """An instance that counts how often somebody asks on which node it is."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        CountedInstance.looks += name == "node"
        return super().__getattribute__(name)


def test_the_instances_of_a_node_are_found_without_a_look_at_all_others(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(cluster_module, "KnownInstance", CountedInstance)
    nodes, each = 20, 10

    async def run() -> None:
        cluster = Cluster(Nodes(), tmp_path / "controller.json")
        await cluster.answer({"op": "deploy", "arguments": {"name": "m", "url": URL, "min": 1, "max": nodes * each}})
        members: Any = cluster._members
        names = [f"n{number}" for number in range(nodes)]
        members._take_list({name: f"http://{name}:8114" for name in names})
        serves = {"model": "m", "state": "ready", "age_s": 1.0, "running": 0, "version": "v1"}
        for turn in range(3):
            CountedInstance.looks = 0
            for name in names:
                instances = [serves | {"id": f"{name}-{number}"} for number in range(each)]
                members._take_status(cluster.state.nodes[name], status_of(name, 0) | {"instances": instances})
                if turn:  # at first, each status has new instances, and so changes the routes
                    await settle()
            status = await cluster.answer({"op": "status"})
            assert [len(node["instances"]) for node in status["nodes"]] == [each] * nodes
            assert not turn or CountedInstance.looks <= 8 * nodes * each
        cluster._tick()  # makes the routes of what the nodes have said
        await settle()
        CountedInstance.looks = 0
        for name in names:  # as in one decision
            cluster.execution.begin(StopInstance(f"{name}-0", name))
        await settle()
        assert CountedInstance.looks <= 8 * nodes * each
        found = cluster.state.routes.current["models"]["m"]["instances"]
        assert [item["state"] for item in found].count("ready") == nodes * (each - 1)
        await cluster.execution.close()

    asyncio.run(run())
