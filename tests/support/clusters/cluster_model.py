"""A cluster without machines: carries out decisions at once or byte by byte, and shows the state that results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from medusa_cluster.policy.decide import Memory, Options, decide
from medusa_cluster.policy.state import (
    ChangeRole,
    ClusterState,
    Consolidate,
    Copy,
    Decision,
    Deployment,
    Drop,
    Fetch,
    Instance,
    Load,
    Node,
    NodeState,
    Pace,
    Pin,
    ResumeInstance,
    SetSpare,
    StartInstance,
    StopInstance,
)

MB = 10**6


def nodes(count: int, memory: int = 1000 * MB, **changes: Any) -> list[Node]:
    return [Node(f"n{number}", link_bytes_per_s=50e6, memory_bytes=memory, **changes) for number in range(count)]


def model(name: str = "m", size: int = 100 * MB, **changes: Any) -> Deployment:
    return Deployment(name, f"s3://{name}", size_bytes=size, **{"max": 8, **changes})


def of(kind: type, decisions: list[Any]) -> list[Any]:
    return [decision for decision in decisions if isinstance(decision, kind)]


class ClusterModel:
    """Advances in ticks. A copy that arrives gains ``link · tick_s`` where its source has more than it."""

    def __init__(self, nodes: list[Node], deployments: list[Deployment], options: Options | None = None) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.deployments = {deployment.name: deployment for deployment in deployments}
        self.loads: dict[str, Load] = {}
        self.options = options
        self.memory = Memory()
        self.now_s = 0.0
        self.store_bytes = 0.0
        self.log: list[Decision] = []

    @property
    def state(self) -> ClusterState:
        return ClusterState(dict(self.nodes), dict(self.deployments), dict(self.loads))

    def tick(self, tick_s: float = 0.1) -> list[Decision]:
        """Decide, carry it out, and let ``tick_s`` pass."""
        decisions, self.memory = decide(self.state, self.now_s, self.memory, self.options)
        for decision in decisions:
            self._do(decision)
        self._transfer(tick_s)
        for name, node in self.nodes.items():
            ready = tuple(self._started(node, instance) for instance in node.instances)
            if ready != node.instances:
                self.nodes[name] = replace(node, instances=ready)
        self.now_s += tick_s
        self.log += decisions
        return decisions

    def run(self, seconds: float, tick_s: float = 0.1) -> list[Decision]:
        return [decision for _ in range(round(seconds / tick_s)) for decision in self.tick(tick_s)]

    def load(self, model: str, waiting: int = 0, running: int = 0, kv_use: float = 0.0) -> None:
        last = self.now_s if waiting or running else self.loads.get(model, Load()).last_request_s
        self.loads[model] = Load(waiting, running, kv_use=kv_use, last_request_s=last)

    def redeploy(self, deployment: Deployment) -> None:
        """Deploy another model under a known name."""
        self.deployments[deployment.name] = deployment
        for name, node in self.nodes.items():
            found = (replace(one, changed=one.url != deployment.url) for one in node.instances)
            self.nodes[name] = replace(node, instances=tuple(found))

    def kill(self, name: str) -> None:
        self.nodes[name] = replace(self.nodes[name], state="lost")

    def copies(self, url: str) -> list[str]:
        return [
            name
            for name, node in self.nodes.items()
            if node.state != "lost" and (c := node.copy(url)) and c.is_complete
        ]

    def instances(self, model: str, state: str = "ready") -> list[Instance]:
        return [
            instance
            for node in self.nodes.values()
            if node.state != "lost"
            for instance in node.instances
            if instance.model == model and instance.state == state
        ]

    def _do(self, decision: Decision) -> None:
        if isinstance(decision, Fetch):
            self._fetch(decision)
        elif isinstance(decision, Drop):
            self._copies(decision.node, [c for c in self.nodes[decision.node].copies if c.url != decision.url])
        elif isinstance(decision, Pin):
            node = self.nodes[decision.node]
            found = [replace(c, pinned=decision.pinned) if c.url == decision.url else c for c in node.copies]
            self._copies(decision.node, found)
        elif isinstance(decision, StartInstance):
            node = self.nodes[decision.node]
            deployment = self.deployments[decision.model]
            slots = deployment.devices if node.computes_on_device(deployment.device) else 1
            beside = any(one.changed and one.model == decision.model for one in node.instances) and not node.devices
            assert beside or node.free_slots(deployment.device) >= slots
            started = Instance(
                decision.id,
                decision.model,
                node.name,
                "starting",
                self.now_s,
                decision.role,
                decision.layers,
                decision.group,
                decision.full,
                slots=slots,
                device=deployment.device,
                url=deployment.url,
            )
            self.nodes[node.name] = replace(node, instances=(*node.instances, started))
        elif isinstance(decision, StopInstance):
            node = self.nodes[decision.node]
            left = tuple(instance for instance in node.instances if instance.id != decision.id)
            assert len(left) < len(node.instances)
            self.nodes[node.name] = replace(node, instances=left)
        elif isinstance(decision, Pace):
            self.nodes[decision.node] = replace(self.nodes[decision.node], pace_bytes_per_s=decision.bytes_per_s)
        elif isinstance(decision, ResumeInstance):
            node = self.nodes[decision.node]
            resumed = (replace(i, state="ready") if i.id == decision.id else i for i in node.instances)
            self.nodes[node.name] = replace(node, instances=tuple(resumed))
        elif isinstance(decision, ChangeRole):
            node = self.nodes[decision.node]
            turned = (replace(i, role=decision.role) if i.id == decision.id else i for i in node.instances)
            self.nodes[node.name] = replace(node, instances=tuple(turned))
        elif isinstance(decision, SetSpare):
            state: NodeState = "draining" if decision.spare else "alive"
            self.nodes[decision.node] = replace(self.nodes[decision.node], spare=decision.spare, state=state)
        elif isinstance(decision, Consolidate):
            for name, node in self.nodes.items():
                whole = tuple(
                    replace(instance, layers=None, group=None) if instance.group == decision.group else instance
                    for instance in node.instances
                    if instance.group != decision.group or instance.id in decision.keep
                )
                self.nodes[name] = replace(node, instances=whole)

    def _fetch(self, fetch: Fetch) -> None:
        node = self.nodes[fetch.node]
        assert node.state == "alive" or node.copy(fetch.url)
        deployment = next(item for item in self.deployments.values() if item.url == fetch.url)
        had = node.copy(fetch.url)
        fetched = had.fetched_bytes if had else 0
        copy = Copy(
            fetch.url, deployment.size_bytes, fetched, deployment.version, pinned=fetch.pin, sources=fetch.sources
        )
        self._copies(fetch.node, [*(c for c in node.copies if c.url != fetch.url), copy])

    def _copies(self, name: str, copies: list[Copy]) -> None:
        used = sum(copy.total_bytes for copy in copies)
        assert used <= self.nodes[name].memory_bytes
        self.nodes[name] = replace(self.nodes[name], copies=tuple(copies), memory_used_bytes=used)

    def _transfer(self, tick_s: float) -> None:
        before = {(node.name, copy.url): copy for node in self.nodes.values() for copy in node.copies}
        for (name, url), copy in before.items():
            node = self.nodes[name]
            if copy.is_complete or node.state == "lost":
                continue
            limit = copy.total_bytes
            if copy.sources:
                source = before.get((copy.sources[0], url))
                dead = self.nodes[copy.sources[0]].state == "lost"
                limit = source.fetched_bytes if source is not None and not dead else 0
            gained = max(min(limit, copy.fetched_bytes + int(node.link_bytes_per_s * tick_s)), copy.fetched_bytes)
            if not copy.sources:
                self.store_bytes += gained - copy.fetched_bytes
            held = [replace(copy, fetched_bytes=gained) if c.url == url else c for c in node.copies]
            self._copies(name, held)
            # The same copy object may be read again in this loop; `before` is the state at the tick's start.

    def _started(self, node: Node, instance: Instance) -> Instance:
        copy = node.copy(self.deployments[instance.model].url) if instance.model in self.deployments else None
        if instance.state == "starting" and copy is not None and copy.is_complete:
            return replace(instance, state="ready", since_s=self.now_s, version=copy.version)
        return instance
