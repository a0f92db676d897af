"""A controller's core, without Ray, over nodes that stand in for node servers behind real control sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from medusa_cluster.controller.cluster import OPTIONS, Cluster
from medusa_cluster.deployment import Deployment
from medusa_cluster.json_lines import JsonLinesServer, call
from medusa_cluster.node.group_worker import GroupWorker
from medusa_cluster.policy.decide import Options
from medusa_runtime.errors import ClusterError, InstanceError
from waiting import until_async

Scenario = Callable[["Net", Cluster], Awaitable[None]]


class StandInNode:
    """Answers like a node server: instances listen at once, fetches are complete at once."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.path = folder / f"{name}.sock"
        self.instances: dict[str, dict[str, Any]] = {}
        self.models: dict[str, dict[str, Any]] = {}
        self.workers: dict[str, GroupWorker] = {}  # instances that share work, by id
        self.calls: list[dict[str, Any]] = []
        self.starts: asyncio.Event | None = None  # a start waits for it
        self.answers: asyncio.Event | None = None  # a status waits for it
        self.asked = False  # and one does
        self.busy: set[str] = set()  # instances that run requests: they do not end, but may be resumed
        self.resumed = asyncio.Event()
        self.refuses: str | None = None  # why no instance starts
        self.loads = True  # else instances that start only listen, until ``loaded``
        self.state = "alive"
        self.device_kind = ""
        self.store_is_away = False
        self.failed_fetches: dict[str, str] = {}
        self.generates = True  # else every model is an encoder
        self.describes_not: str | None = None  # why it describes no model
        self.version = "v1"  # of what it fetches
        self.arrives = False  # what it fetches is on its way, until ``arrived``
        self.refuses_groups: str | None = None
        self.port = 8  # the last one that it gave
        self.server = JsonLinesServer(self.path, self.answer)

    async def answer(self, request: dict[str, Any]) -> Any:
        if request["op"] not in ("status", "ping", "describe"):
            self.calls.append(request)
        return await getattr(self, request["op"])(request)

    async def status(self, _: dict[str, Any]) -> dict[str, Any]:
        if self.answers is not None:
            self.asked = True
            await self.answers.wait()
        return {
            "name": self.name,
            "address": f"{self.name}:8114",
            "url": f"http://{self.name}:8114",
            "state": self.state,
            "device_kind": self.device_kind,
            "link_bytes_per_s": 1e8,
            "memory_bytes": 10**9,
            "memory_used_bytes": 0,
            "models": list(self.models.values()),
            "instances": list(self.instances.values()),
            "failed_fetches": self.failed_fetches,
        }

    async def ping(self, _: dict[str, Any]) -> dict[str, Any]:
        return {}

    async def fetch(self, request: dict[str, Any]) -> dict[str, Any]:
        url = request["url"]
        if self.store_is_away:
            self.failed_fetches[url] = "Storage.Unreachable"
            return {}
        self.failed_fetches.pop(url, None)
        if self.arrives and url in self.models:
            return {}
        self.models[url] = {"url": url, "state": "done", "fetched_bytes": 100, "total_bytes": 100, "idle_s": 0}
        self.models[url] |= {"pinned": request["pin"], "version": self.version}
        if self.arrives:
            self.models[url] |= {"state": "fetching", "fetched_bytes": 0}
        return {}

    def arrived(self) -> None:
        for model in self.models.values():
            model |= {"state": "done", "fetched_bytes": model["total_bytes"]}

    async def describe(self, _: dict[str, Any]) -> dict[str, Any]:
        if self.describes_not:
            raise InstanceError(self.describes_not)
        parts = {"total_bytes": 4 * 10**8, "entry": 0, "layers": [5 * 10**7] * 8, "exit": 0, "times": None}
        return parts | {"generates": self.generates}

    async def group_port(self, _: dict[str, Any]) -> dict[str, Any]:
        if self.refuses_groups:
            raise InstanceError(self.refuses_groups)
        self.port += 1
        return {"port": self.port}

    async def consolidate(self, _: dict[str, Any]) -> dict[str, Any]:
        return {}

    async def release(self, request: dict[str, Any]) -> dict[str, Any]:
        self.become(request["id"], "released")
        return {}

    def become(self, instance_id: str, state: str) -> None:
        """Let an instance that helps another one show this state: serving, prefilling or released."""
        self.instances[instance_id] |= self.workers[instance_id].status(state)

    async def unpin(self, request: dict[str, Any]) -> dict[str, Any]:
        self.models[request["url"]]["pinned"] = False
        return {}

    async def drop(self, request: dict[str, Any]) -> dict[str, Any]:
        self.models.pop(request["url"], None)
        return {}

    async def pace(self, _: dict[str, Any]) -> dict[str, Any]:
        return {}

    async def start(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.refuses:
            raise InstanceError(self.refuses)
        if self.starts is not None:
            await self.starts.wait()
        name = request["deployment"]["name"]
        started = {"id": request["id"], "model": name, "state": "ready", "age_s": 0.0, "version": self.version}
        deployment = Deployment.from_json(request["deployment"])
        started |= {"deployment": deployment.digest, "url": deployment.url, "answers": self.loads}
        self.instances[request["id"]] = started
        if "group" in request:
            self.workers[request["id"]] = GroupWorker.from_json(request["group"], "127.0.0.1")
            self.become(request["id"], "serving")
        return {"port": 1}

    def loaded(self) -> None:
        for instance in self.instances.values():
            instance["answers"] = True

    def fail(self, instance_id: str, failure: str) -> None:
        self.instances[instance_id] |= {"state": "failed", "failure": failure}

    async def stop(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["id"] in self.busy:
            self.resumed.clear()
            self.instances[request["id"]]["state"] = "draining"
            await self.resumed.wait()
            return {"ended": False}
        self.instances.pop(request["id"], None)
        return {"ended": True}

    async def resume(self, request: dict[str, Any]) -> dict[str, Any]:
        resumed = request["id"] in self.busy
        if resumed:
            self.instances[request["id"]]["state"] = "ready"
            self.resumed.set()
        return {"resumed": resumed}


class Net:
    """The way to stand-in nodes."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self.nodes = {name: StandInNode(name, folder) for name in names}
        self.listed = set(names)
        self.cut: set[str] = set()  # cannot be told anything
        self.serving: set[str] = set()  # of those, answer requests
        self.requested: list[int] = []  # nodes, of an autoscaler
        self.refusals = 0  # of the next such wishes
        self.forgotten: set[str] = set()

    def calls(self) -> list[dict[str, Any]]:
        """Return what all nodes were told."""
        return [call for node in self.nodes.values() for call in node.calls]

    async def servers(self) -> dict[str, str] | None:
        return {name: f"http://{name}:8114" for name in self.listed}

    async def status(self, node: str, url: str, timeout_s: float) -> Any:
        assert url == f"http://{node}:8114"
        if node in self.cut - self.serving:
            raise ClusterError(f"{node} does not answer")
        return await self._ask(node, {"op": "status"}, timeout_s)

    async def logs(self, node: str, url: str, log: str | None, after: int | None, timeout_s: float) -> Any:
        return {"agent": 8} if log is None else {"text": f"{log} of {url}", "end": after or 8}

    async def call(self, node: str, request: dict[str, Any], timeout_s: float) -> Any:
        if node in self.cut:
            raise ClusterError(f"{node} cannot be reached")
        return await self._ask(node, request, timeout_s)

    async def _ask(self, node: str, request: dict[str, Any], timeout_s: float) -> Any:
        try:
            return await asyncio.wait_for(call(self.nodes[node].path, request), timeout_s)
        except OSError as error:
            raise ClusterError(f"{node}: {error}") from error

    def group_token(self, group: str) -> str:
        return f"secret of {group}"

    async def forget(self, node: str) -> None:
        self.forgotten.add(node)

    async def request_nodes(self, total: int, gpus: Sequence[int] = ()) -> None:
        if self.refusals:
            self.refusals -= 1
            raise ClusterError("the autoscaler does not answer")
        self.requested.append(total)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    """Run a scenario against a controller; a second one in the same test finds what the first has left on disk."""

    def run(scenario: Scenario, *names: str, net: Net | None = None, options: Options = OPTIONS) -> None:
        async def body() -> None:
            found = net or Net(tmp_path, names)
            for node in found.nodes.values():
                await node.server.start()
            cluster = Cluster(found, tmp_path / "controller.json", options)
            working = asyncio.create_task(cluster.run())
            try:
                await until_async(
                    lambda: all(node.status for node in cluster.state.nodes.values()) and len(cluster.state.nodes)
                )
                await scenario(found, cluster)
            finally:
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)
                for node in found.nodes.values():
                    await node.server.close()

        asyncio.run(body())

    return run
