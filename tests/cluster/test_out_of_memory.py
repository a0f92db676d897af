"""The kernel's kill for want of memory, of what keeps a cluster running: no request is lost, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_nodes import MODEL, PATIENCE_S, ClusterNode
from gateway_fixtures import NAME, GatewayProcess
from medusa_cluster.json_lines import call
from medusa_runtime.errors import MedusaError, NodeError
from medusa_runtime.node.client import NodeClient
from medusa_runtime.storage.sources import ORIGIN
from memory_group import MemoryGroup
from process_tree import alive, children
from shared_memory import shared_files
from slow_origin import SlowAfterAWhile, SlowOrigin, serving_origin
from waiting import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(900),  # Ray takes its time on a busy machine
]

SHORT = {"prompt": "This function returns", "temperature": 0, "max_tokens": 8}
LONG = SHORT | {"max_tokens": 450, "ignore_eos": True}
NAMED = "memory ran out, the limit is "
CONTROLLER, ACTOR, SERVER = "ray::Controller", "ray::NodeActor", "node server"
MARGINS = {"files": 0, "sockets": 4, "shared": 1 << 20}
PHASES = ("idle", "start", "serve", "transfer")


class Limited:
    """A head and a node, each with a memory limit, a gateway without one, and a store that can be slow."""

    def __init__(self, groups: tuple[MemoryGroup, MemoryGroup], origin: SlowOrigin, folder: Path) -> None:
        self.origin = origin
        self.groups = dict(zip(("head", "n1"), groups, strict=True))
        self.nodes: dict[str, ClusterNode] = {}
        try:
            self.head = self._start("head", 0)
            self._start("n1", 1)
            self.gateway = GatewayProcess(folder, self.head.address, self.head.token_file, "--hold-s", "200")
        except BaseException:
            self.close()
            raise

    def _start(self, name: str, number: int) -> ClusterNode:
        node = ClusterNode(name, number, self.nodes.get("head"), wrapper=self.groups[name].inside)
        self.nodes[name] = node
        return node.wait_ready()

    def close(self) -> None:
        for node in reversed(self.nodes.values()):
            node.close()

    def call(self, operation: str, **arguments: Any) -> Any:
        """Call the controller as soon as it is there."""
        found: list[Any] = []

        def asked() -> bool:
            with contextlib.suppress(MedusaError, OSError):
                found.append(self.head.call(operation, **arguments))
            return bool(found)

        until(asked, self.output)
        return found[0]

    def output(self) -> str:
        return "\n".join(f"{name}: {node.output()[-2000:]}" for name, node in self.nodes.items())

    def ask(self, name: str, operation: str, **arguments: Any) -> Any:
        """Use a node's control socket."""
        return asyncio.run(call(self.nodes[name].folder / "control.sock", {"op": operation} | arguments))

    def model(self, name: str) -> dict[str, Any]:
        """Return what a node has of the one model."""
        return next(iter(self.ask(name, "status")["models"]), {"state": "absent", "fetched_bytes": 0})

    def instances(self) -> list[str]:
        """The nodes with an instance that listens."""
        routes = self.call("routes")["models"][NAME]["instances"]
        return [item["node"] for item in routes if item["state"] == "ready"]

    def pid(self, victim: str, node: str) -> int | None:
        if victim == SERVER:
            return next(iter(children(self.nodes[node].process.pid)), None)
        return next((pid for pid, name in self.nodes[node].processes().items() if name.startswith(victim)), None)

    def alive(self) -> bool:
        """Return whether all nodes are, and what their agents keep ready is there."""
        states = {node["name"]: node["state"] for node in self.call("status")["nodes"]}
        kept = [{"torch-zygote", "engine", "spare"} <= set(node.processes().values()) for node in self.nodes.values()]
        # A spare allocates its memory after its start, at its leisure.
        return states == dict.fromkeys(self.nodes, "alive") and all(kept) and all(map(self.spare_bytes, self.nodes))

    def spare_bytes(self, name: str) -> int:
        """Return what a node's agent has allocated for the next model."""
        with contextlib.suppress(NodeError):
            agent = NodeClient(str(self.nodes[name].folder / "node.sock"))
            with contextlib.closing(agent):
                return int(agent.status()["ready_bytes"])
        return 0

    def rest(self) -> None:
        """Have all nodes as if nothing had ever been deployed."""
        self.call("remove", name=NAME)
        until(lambda: not any(self.ask(name, "status")["instances"] for name in self.nodes), self.output)
        for name in self.nodes:
            until(lambda name=name: self.dropped(name), self.output)
        # A controller that has not seen it yet would have the other node read from a copy that is gone.
        until(lambda: not any(node["models"] for node in self.call("status")["nodes"]), self.output)

    def dropped(self, name: str) -> bool:
        """Have a node drop the model; it refuses for as long as something uses it."""
        with contextlib.suppress(NodeError):  # it has none
            self.ask(name, "drop", url=self.origin.url)
        return bool(self.model(name)["state"] == "absent")

    def held(self, name: str) -> dict[str, Any]:
        """Return a node's processes, its shared memory, and how many files its server and agent have open."""
        server, processes = self.pid(SERVER, name), self.nodes[name].processes()
        (agent,) = [pid for pid in children(server or 0) if b"node\0--socket" in command_line(pid)]
        files = [file for pid in (server, agent) for file in open_files(pid)]
        sockets = sum(file.startswith("socket:") for file in files)
        return {
            "processes": Counter(processes.values()),
            "sockets": sockets,
            "files": len(files) - sockets,
            "shared": self.groups[name].shared_bytes(),
        }

    def shared_files(self, name: str) -> str:
        """Return what lies in a node's shared memory, and which processes hold it."""
        node = self.nodes[name]
        return "\n".join(map(str, shared_files(node.processes() | {node.process.pid: "keeper"})))


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def open_files(pid: int | None) -> list[str]:
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(descriptor))
    return found


class Asking:
    """Clients of the gateway that ask again and again from ``begin`` on; a context manager, which ends them."""

    def __init__(self, gateway: GatewayProcess, body: dict[str, Any], clients: int = 2) -> None:
        self.answers: list[Any] = []
        self._gateway, self._body = gateway, {"model": NAME} | body
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]

    def __enter__(self) -> Asking:
        return self

    def begin(self) -> Asking:
        for thread in self._threads:
            thread.start()
        return self

    def _ask(self) -> None:
        while not self._ended.is_set():
            try:
                self.answers.append(self._answer())
            except (OSError, http.client.HTTPException) as error:
                self.answers.append(error)
                self._ended.wait(0.2)

    def _answer(self) -> Any:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._gateway.port, timeout=240)) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(self._body), headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        return answer["choices"][0]["text"] if response.status == 200 else (response.status, str(answer))

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(PATIENCE_S)

    def running(self) -> bool:
        return self._gateway.metric("medusa_gateway_running") > 0


@pytest.fixture(scope="module", params=[3000, 1000], ids=lambda limit: f"{limit}MB")
def limited(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    with (
        MemoryGroup(request.param) as head,
        MemoryGroup(request.param) as other,
        serving_origin(MODEL, 1e9, SlowAfterAWhile) as origin,
    ):
        cluster = Limited((head, other), origin, tmp_path_factory.mktemp("gateway"))
        try:
            ask_once(cluster)
            yield cluster
            assert cluster.gateway.stop() == 0
            assert [node.end() for node in reversed(cluster.nodes.values())] == [0, 0]
            until(lambda: head.shared_bytes() + other.shared_bytes() == 0)
        finally:
            cluster.gateway.kill()
            cluster.close()


def ask_once(limited: Limited) -> None:
    """Have both nodes work once, so that they have open what they open only then."""
    limited.call("deploy", name=NAME, url=limited.origin.url, min=2, max=2)
    until(lambda: len(limited.instances()) == 2, limited.output)
    with Asking(limited.gateway, SHORT).begin() as asking:
        until(lambda: len(asking.answers) > 2, limited.output)
    limited.rest()
    until(limited.alive, limited.output)


def reach(limited: Limited, phase: str, asking: Asking) -> str:
    """Bring the cluster into a phase of its work; returns a node that takes part in it."""
    limited.origin.sent = 0
    limited.origin.bytes_per_s = 1e9 if phase in ("idle", "serve") else 1e4
    limited.call("deploy", name=NAME, url=limited.origin.url, min=2 if phase == "transfer" else 0, max=2)
    if phase == "idle":
        return "n1"
    asking.begin()
    if phase == "serve":
        until(lambda: asking.running() and limited.instances(), limited.output)
        return limited.instances()[0]
    fetching = [name for name in limited.nodes if limited.model(name)["state"] == "fetching"]

    def reached() -> bool:
        fetching[:] = [name for name in limited.nodes if limited.model(name)["fetched_bytes"]]
        if phase == "start":
            return bool(fetching)
        fetching[:] = [name for name in fetching if from_peers(limited.model(name))]
        return bool(fetching)

    until(reached, lambda: f"{[limited.model(name) for name in limited.nodes]}\n{limited.output()}")
    return fetching[0]


def from_peers(model: dict[str, Any]) -> int:
    """Return how many bytes of a model have come from other nodes."""
    return sum(count for source, count in model["received_bytes"].items() if source != ORIGIN)


def test_engines_end_before_what_keeps_a_cluster_running(limited: Limited) -> None:
    until(limited.alive, limited.output)
    kept = {
        (victim, name): limited.pid(victim, name) for victim in (CONTROLLER, ACTOR, SERVER) for name in limited.nodes
    }
    kills = limited.groups["head"].kills()
    limited.groups["head"].exhaust()
    assert limited.groups["head"].kills() == kills + 1
    assert {(victim, name): limited.pid(victim, name) for victim, name in kept} == kept
    until(limited.alive, limited.output)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", [CONTROLLER, ACTOR, SERVER], ids=["controller", "node-actor", "node-server"])
def test_what_keeps_a_cluster_running(limited: Limited, victim: str, phase: str) -> None:
    until(limited.alive, limited.output)
    before = {name: limited.held(name) for name in limited.nodes}
    try:
        with Asking(limited.gateway, LONG if phase == "serve" else SHORT) as asking:
            node = lose(limited, victim, phase, asking)
    finally:
        limited.origin.bytes_per_s = 1e9
    limited.rest()
    for name in limited.nodes:
        until(
            lambda name=name: at_most(limited.held(name), before[name]),
            lambda name=name: f"{limited.held(name)}, before: {before[name]}\n{limited.shared_files(name)}",
        )
    assert NAMED in limited.nodes[node].output()


def lose(limited: Limited, victim: str, phase: str, asking: Asking) -> str:
    """Have the kernel kill a process in a phase of its work; returns its node, which goes on with another one."""
    node = reach(limited, phase, asking)
    if victim == CONTROLLER:
        node = "head"
    kills = {name: group.kills() for name, group in limited.groups.items()}
    pid = limited.pid(victim, node)
    assert pid is not None
    limited.groups[node].kill(pid)
    until(lambda: not alive(pid), limited.output)
    limited.origin.bytes_per_s = 1e9
    until(lambda: limited.pid(victim, node) not in (None, pid), limited.output)
    until(limited.alive, limited.output)
    if phase == "transfer":
        until(lambda: len(limited.instances()) == 2, limited.output)
    answered = len(asking.answers)
    if phase == "idle":
        asking.begin()
    until(lambda: len(asking.answers) > answered + 2, limited.output)
    asking.end()
    assert len(set(asking.answers)) == 1, asking.answers
    assert isinstance(asking.answers[0], str)
    kills[node] += 1
    assert {name: group.kills() for name, group in limited.groups.items()} == kills
    return node


def at_most(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Return whether no more is held than before:

    but for some connections that are kept, and Ray's own shared memory.
    """
    less = all(now[name] <= before[name] + margin for name, margin in MARGINS.items())
    return bool(now["processes"] == before["processes"] and less)
