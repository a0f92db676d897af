"""The placement of new instances: on nodes that have the weights, else where these arrive soonest (ParaServe §4.2)."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count

from .contention import Fetching, newcomer_bytes_per_s
from .index import Index
from .pool import evict, is_current, room
from .sizing import DEVICE_OVERHEAD_BYTES, CandidateNode
from .state import Deployment, Node

_MOST_CANDIDATES = 16


@dataclass
class Placement:
    """The free slots of one tick, and the fetches on the nodes' links, including those decided in this tick.

    ``deadlines_s``: (node, URL) → deadline of a fetch under way. Without ``contention_aware``, nodes are taken in the
    order of their names whatever they fetch, like a scheduler that knows nothing about links.
    """

    nodes: Mapping[str, Node]
    index: Index
    by_url: Mapping[str, Deployment]
    now_s: float
    deadlines_s: Mapping[tuple[str, str], float]
    contention_aware: bool = True
    _taken: dict[str, int] = field(default_factory=dict)
    _added: defaultdict[str, list[Fetching]] = field(default_factory=lambda: defaultdict(list))
    _ordered: deque[str] = field(default_factory=deque)  # the candidates seen so far
    _remaining: Iterator[str] | None = None
    _offers: dict[str, CandidateNode] = field(
        default_factory=dict
    )  # node → the bandwidth and memory that it has for one more fetch
    _too_large: dict[str, bool] = field(default_factory=dict)  # deployment → whether no accelerator has room for it

    def free_slots(self, name: str) -> int:
        return self.index.free.get(name, 0) - self._taken.get(name, 0)

    def take(self, name: str, deployment: Deployment) -> None:
        self._taken[name] = self._taken.get(name, 0) + self._slots(name, deployment)

    def add_fetch(self, name: str, url: str, size_bytes: float, deadline_s: float) -> None:
        self._added[name].append(Fetching(url, size_bytes, deadline_s))
        self._offers.pop(name, None)

    def bytes_per_s(self, name: str) -> float:
        """Return the bandwidth for one more fetch on a node, or 0 if it would make another one late."""
        if not self.contention_aware:
            return self.nodes[name].link_bytes_per_s
        return newcomer_bytes_per_s(self.nodes[name].link_bytes_per_s, self._fetching(self.nodes[name]), self.now_s)

    def holders(self, deployment: Deployment, planned: str | None = None) -> list[CandidateNode]:
        """Return nodes with a free slot that have the model or receive it, ordered by how few bytes are missing.

        ``planned``: a node that is about to receive it.
        """
        found = []
        for name, copy in self.index.holders.get(deployment.url, {}).items():
            if copy.layers is not None or not is_current(copy, deployment) or not self._can_run(name, deployment):
                continue
            missing = max((copy.total_bytes or deployment.size_bytes) - copy.fetched_bytes, 0)
            found.append((missing, -self.free_slots(name), name))
        if planned is not None and self._can_run(planned, deployment):
            found.append((deployment.size_bytes, 0, planned))
        servers = []
        for missing, _, name in sorted(found):
            node = self.nodes[name]
            rate = self._arrival_rate(deployment, missing, node)
            servers.append(self._on_device(CandidateNode(name, rate), deployment))
        return servers

    def others(self, deployment: Deployment) -> Iterator[CandidateNode]:
        """Yield nodes with a free slot and room for the weights, the fastest links first."""
        for name in self._candidates():
            if not self._can_run(name, deployment) or self.nodes[name].copy(deployment.url) is not None:
                continue
            server = self._offers.get(name) or self._offer(name)
            if server.fetch_bytes_per_s > 0 and server.free_bytes > 0:
                yield self._on_device(server, deployment)

    def _offer(self, name: str) -> CandidateNode:
        node = self.nodes[name]
        server = self._offers[name] = CandidateNode(name, self.bytes_per_s(name), free_bytes=self._space(node))
        return server

    def _space(self, node: Node) -> float:
        """Return the bytes of a node's memory in which weights may lie."""
        return room(node, self.by_url) if node.memory_bytes else math.inf

    def _on_device(self, server: CandidateNode, deployment: Deployment) -> CandidateNode:
        """Return the server with what its accelerator, if the deployment uses one, has for a worker."""
        node = self.nodes[server.node]
        known = node.device_bytes > 0 or node.load_bytes_per_s < math.inf
        if not known or not node.processor(deployment.device).on_gpu:
            return server
        room_bytes = self._device_room(node, deployment)
        return replace(server, load_bytes_per_s=node.load_bytes_per_s, device_bytes=room_bytes)

    def _device_room(self, node: Node, deployment: Deployment) -> float:
        """Return the free bytes for weights, keys and values on the accelerators that the next instance is given."""
        if not node.device_bytes or not node.processor(deployment.device).on_gpu:
            return math.inf
        taken = self._taken.get(node.name, 0)
        given = node.device_free_bytes[taken : taken + deployment.devices]
        return _for_model(min(given), deployment) if len(given) == deployment.devices else 0

    def can_hold(self, name: str, deployment: Deployment) -> bool:
        """Return whether a node has a free slot for the deployment, and room for all of it on its accelerator.

        If no accelerator of the cluster has that room, the engine of one of them has to say so.
        """
        if not self._can_run(name, deployment):
            return False
        return self._device_room(self.nodes[name], deployment) >= _needed(deployment) or self._is_too_large(deployment)

    def _is_too_large(self, deployment: Deployment) -> bool:
        """Return whether no node has an accelerator with so much memory, or can do without one."""
        found = self._too_large.get(deployment.name)
        if found is None:
            found = self._too_large[deployment.name] = not any(
                other.state == "alive" and self._is_for(other, deployment) and _is_large_enough(other, deployment)
                for other in self.nodes.values()
            )
        return found

    def on_accelerators(self, deployment: Deployment) -> Deployment | None:
        """Return the deployment as one that starts on accelerators alone, or None if that makes no difference."""
        if deployment.device != "auto" or not self.index.is_mixed:
            return None
        self._is_too_large(deployment)  # for all processors
        return replace(deployment, device="cuda")

    def choose(self, deployment: Deployment, planned: str | None = None) -> str | None:
        """Return the node for a whole instance, or None if no slot is free or the weights fit nowhere.

        Where the deployment may use an accelerator, a node with a free one comes first, and one that becomes free is
        waited for; where it may not, a node without any. If no node has the model, it is the best of the first servers
        on which nothing else is fetched.
        """
        accelerated = self.on_accelerators(deployment)
        if accelerated is not None:
            found = self._choose(accelerated, planned)
            if found is not None or self.waits(accelerated):
                return found
        found = self._choose(deployment, planned)
        if found is not None and deployment.device == "cpu" and self.nodes[found].devices:
            return self._without_accelerator(deployment) or found
        return found

    def waits(self, deployment: Deployment) -> bool:
        """Return whether a start waits for an accelerator where processors are free.

        It does if it computes on several, and if an instance ends on a node whose accelerators are large enough.
        """
        if deployment.devices > 1:
            return True
        return any(self._is_for(node, deployment) and _is_large_enough(node, deployment) for node in self._emptying)

    @cached_property
    def _emptying(self) -> list[Node]:
        """The nodes on which an instance ends."""
        return [
            node
            for node in self.nodes.values()
            if node.state == "alive" and any(instance.state == "draining" for instance in node.instances)
        ]

    def _without_accelerator(self, deployment: Deployment) -> str | None:
        """Return a node without accelerators, which leaves those of others to deployments that use them."""
        for name in self.index.by_link:
            node = self.nodes[name]
            if not node.devices and self._space(node) >= deployment.size_bytes and self.can_hold(name, deployment):
                return name
        return None

    def _choose(self, deployment: Deployment, planned: str | None) -> str | None:
        for server in self.holders(deployment, planned):
            if self.can_hold(server.node, deployment):
                return server.node
        best: CandidateNode | None = None
        for seen, server in enumerate(self.others(deployment)):
            if server.free_bytes < deployment.size_bytes or not self.can_hold(server.node, deployment):
                continue
            if best is None or server.s_per_byte < best.s_per_byte:
                best = server
            if seen >= _MOST_CANDIDATES or server.node not in self._added:
                break
        return best.node if best else self._slow_node(deployment)

    def _slow_node(self, deployment: Deployment) -> str | None:
        """Return a node where the start is slow, or makes other starts slow. It is better than none."""
        for name in self._candidates():
            if self._space(self.nodes[name]) >= deployment.size_bytes and self.can_hold(name, deployment):
                return name
        return self._after_eviction(deployment)

    def _after_eviction(self, deployment: Deployment) -> str | None:
        """Return a node that can drop copies of the pool to make room for the weights: those unused for the longest."""
        found: list[tuple[float, str]] = []
        for name in self._candidates():
            if name in self._added or not self.can_hold(name, deployment):
                continue
            node = self.nodes[name]
            drops = evict(node, deployment.size_bytes, self.by_url, pinned=True)
            if drops is None:
                continue
            gone = {drop.url for drop in drops}
            found.append((max(copy.used_at_s for copy in node.copies if copy.url in gone), name))
            if len(found) == _MOST_CANDIDATES:
                break
        return min(found)[1] if found else None

    def _can_run(self, name: str, deployment: Deployment) -> bool:
        free = self.free_slots(name)
        return free > 0 and free >= self._slots(name, deployment) and self._is_for(self.nodes[name], deployment)

    def _slots(self, name: str, deployment: Deployment) -> int:
        """Return how many of a node's slots an instance takes."""
        shares = deployment.devices > 1 and self.nodes[name].processor(deployment.device).on_gpu
        return deployment.devices if shares else 1

    @staticmethod
    def _is_for(node: Node, deployment: Deployment) -> bool:
        if deployment.device == "cuda" and not node.devices:
            return False
        return not deployment.device_kind or deployment.device_kind == node.device_kind

    def _candidates(self) -> Iterator[str]:
        """Yield nodes with a free slot, the fastest links first, but those that fetch something last."""
        if self._remaining is None:
            self._remaining = self._in_order()
        ordered = self._ordered
        while ordered and self.free_slots(ordered[0]) <= 0:
            ordered.popleft()
        for position in count():
            if position == len(ordered):
                found = next(self._remaining, None)
                if found is None:
                    return
                ordered.append(found)
            yield ordered[position]

    def _in_order(self) -> Iterator[str]:
        """Yield the candidates in order; few of a large cluster's nodes are ever looked at."""
        free = self.index.free
        if not self.contention_aware:
            yield from (name for name in self.index.by_name if name in free)
            return
        fetching = {name for name, _ in self.index.arriving}
        busy = {name: self.bytes_per_s(name) for name in fetching if name in free}
        yield from (name for name in self.index.by_link if name in free and name not in fetching)
        yield from sorted(busy, key=lambda name: (-busy[name], name))

    def _fetching(self, node: Node) -> list[Fetching]:
        found = list(self._added[node.name]) if node.name in self._added else []
        for copy in node.copies:
            if not copy.is_complete and copy.fetched_bytes < copy.total_bytes:
                deadline = self.deadlines_s.get((node.name, copy.url), math.inf)
                found.append(Fetching(copy.url, copy.total_bytes - copy.fetched_bytes, deadline))
        return found

    def _arrival_rate(self, deployment: Deployment, missing: int, node: Node) -> float:
        """Return the bandwidth at which a fetch of the whole model would end when the missing bytes have come."""
        if missing <= 0:
            return math.inf
        share = node.link_bytes_per_s / max(len(self._fetching(node)), 1)
        return share * max(deployment.size_bytes, missing) / missing


def _needed(deployment: Deployment) -> int:
    """Return the bytes that a whole instance takes of its accelerators, beside the overhead of each."""
    return deployment.size_bytes + deployment.kv_bytes


def _is_large_enough(node: Node, deployment: Deployment) -> bool:
    """Return whether a whole instance has room on a node's accelerators when they are empty, or needs none."""
    return not node.device_bytes or _for_model(node.device_bytes, deployment) >= _needed(deployment)


def _for_model(device_bytes: int, deployment: Deployment) -> int:
    """Return the bytes for weights, keys and values on the accelerators of an instance, by those of each."""
    return max(device_bytes - DEVICE_OVERHEAD_BYTES, 0) * deployment.devices
