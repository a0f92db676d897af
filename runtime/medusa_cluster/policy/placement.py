"""The placement of new instances: on nodes that have the weights, else where these arrive soonest (ParaServe §4.2)."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

from ..deployment import Device
from .accelerators import Needs, Rival, left_over, needed_bytes
from .index import Index
from .pool import evict, is_current, room
from .sizing import DEVICE_OVERHEAD_BYTES, CandidateNode, Fetching, newcomer_bytes_per_s
from .state import Deployment, FreeDevice, Node

MOST_CANDIDATES = 16


class Candidates:
    """The nodes with a free slot, in an order in which few of a large cluster's nodes are ever looked at."""

    def __init__(self, names: Iterator[str], free: Callable[[str], int]) -> None:
        self._remaining, self._free = names, free
        self._seen: deque[str] = deque()

    def __iter__(self) -> Iterator[str]:
        seen = self._seen
        while seen and self._free(seen[0]) <= 0:
            seen.popleft()
        for position in count():
            if position == len(seen):
                found = next(self._remaining, None)
                if found is None:
                    return
                seen.append(found)
            yield seen[position]


@dataclass
class Placement:
    """The free slots of one tick, and the fetches on the nodes' links, including those decided in this tick.

    ``deployments`` are all of the cluster: an accelerator that another one needs more is taken last.
    ``deadlines_s``: (node, URL) → deadline of a fetch under way. Without ``contention_aware``, nodes are taken in the
    order of their names whatever they fetch, like a scheduler that knows nothing about links.
    """

    nodes: Mapping[str, Node]
    index: Index
    by_url: Mapping[str, Deployment]
    deployments: Mapping[str, Deployment]
    most_devices: int  # that an instance of any of these takes
    now_s: float
    deadlines_s: Mapping[tuple[str, str], float]
    contention_aware: bool = True
    _taken: dict[str, int] = field(default_factory=dict)  # slots of nodes
    _taken_beside: dict[str, int] = field(default_factory=dict)  # processors of nodes with accelerators
    _left: dict[str, tuple[FreeDevice, ...]] = field(default_factory=dict)  # node → its free accelerators
    _added: defaultdict[str, list[Fetching]] = field(default_factory=lambda: defaultdict(list))
    _offers: dict[str, CandidateNode] = field(
        default_factory=dict
    )  # node → the bandwidth and memory that it has for one more fetch
    _rivals_of: dict[tuple[int, int, str], list[Rival]] = field(default_factory=dict)
    _with_devices: dict[str, list[Node]] = field(default_factory=dict)  # kind → nodes with accelerators, or all
    _costs_of: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _rooms: defaultdict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    _most_room: dict[tuple[int, str], float] = field(default_factory=dict)
    _too_large: dict[str, bool] = field(default_factory=dict)  # deployment → whether no accelerator has room for it

    def free_slots(self, name: str, device: Device = "auto") -> int:
        """Return the slots of a node that are free for instances with this ``--device``."""
        if device == "cpu" and self.nodes[name].devices:
            return (name in self.index.free_processors) - self._taken_beside.get(name, 0)
        return self.index.free.get(name, 0) - self._taken.get(name, 0)

    def take(self, name: str, deployment: Deployment, workers: int = 1) -> None:
        """Take a node's slots for an instance, or for a worker with one part of several."""
        node = self.nodes[name]
        if node.computes_on_device(deployment.device):
            self._left[name] = left_over(self.left(node), deployment.devices, needed_bytes(deployment, workers))
        taken = self._taken_beside if node.devices and deployment.device == "cpu" else self._taken
        taken[name] = taken.get(name, 0) + self.slots(name, deployment)

    def reserve(self, node: Node, deployment: Deployment) -> int:
        """Keep what is usable of a node for an instance that starts there soon. Returns the slots that it lacks."""
        count = min(self.usable_slots(node, deployment), self.slots(node.name, deployment))
        if node.computes_on_device(deployment.device):
            self._left[node.name] = left_over(self.left(node), count, needed_bytes(deployment))
        taken = self._taken_beside if node.devices and deployment.device == "cpu" else self._taken
        taken[node.name] = taken.get(node.name, 0) + count
        return self.slots(node.name, deployment) - count

    def left(self, node: Node) -> tuple[FreeDevice, ...]:
        """Return a node's free accelerators, the roomiest first. Empty if nothing is known of their memory."""
        found = self._left.get(node.name)
        if found is None:
            found = self._left[node.name] = node.free_devices
        return found

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
            found.append((missing, -self.free_slots(name, deployment.device), name))
        if planned is not None and self._can_run(planned, deployment):
            found.append((deployment.size_bytes, 0, planned))
        servers = []
        for missing, _, name in sorted(found):
            node = self.nodes[name]
            rate = self._arrival_rate(deployment, missing, node)
            servers.append(self._on_device(CandidateNode(name, rate), deployment))
        return servers

    def others(self, deployment: Deployment, suits: Callable[[str], bool] = lambda _: True) -> Iterator[CandidateNode]:
        """Yield nodes with a free slot and room for the weights, the fastest links first."""
        for name in self._candidates(deployment):
            if not suits(name) or not self._can_run(name, deployment):
                continue
            if self.nodes[name].copy(deployment.url) is not None:
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
        if not known or not node.computes_on_device(deployment.device):
            return server
        room_bytes = self._device_room(node, deployment)
        return replace(server, load_bytes_per_s=node.load_bytes_per_s, device_bytes=room_bytes)

    def _device_room(self, node: Node, deployment: Deployment) -> float:
        """Return the free bytes for weights, keys and values on the accelerators that the next instance is given."""
        if not node.device_bytes or not node.computes_on_device(deployment.device):
            return math.inf
        roomiest = self.left(node)[: deployment.devices]
        return _for_model(min(roomiest).free_bytes, deployment) if len(roomiest) == deployment.devices else 0

    def room(self, name: str, devices: int) -> float:
        """Return the free bytes of each of a node's roomiest accelerators, of which there are to be so many.

        They are those of when they were asked for first in the tick. By now, they may be fewer.
        """
        rooms = self._rooms[devices]
        found = rooms.get(name)
        if found is None:
            node = self.nodes[name]
            found = math.inf
            if node.device_bytes and node.devices:
                left = self.left(node)[:devices]
                found = min(left).free_bytes if len(left) == devices else 0
            rooms[name] = found
        return found

    def most_room(self, deployment: Deployment) -> float:
        """Return the most bytes that each of its accelerators may have free on any node of the kind that it needs."""
        key = deployment.devices, deployment.device_kind
        if key not in self._most_room:
            fitting = (name for name in self.index.free if _is_kind(self.nodes[name], deployment))
            self._most_room[key] = max((self.room(name, deployment.devices) for name in fitting), default=-1)
        return math.inf if deployment.device == "cpu" else self._most_room[key]

    def least_room(self, deployment: Deployment) -> int:
        """Return the bytes that it needs of each of its accelerators; 0 if its engine has to say that."""
        return 0 if self.is_too_large(deployment) else needed_bytes(deployment)

    def can_hold(self, name: str, deployment: Deployment) -> bool:
        """Return whether a node has a free slot for the deployment, and room for all of it on its accelerator.

        If no accelerator of the cluster has that room, the engine of one of them has to say so.
        """
        if not self._can_run(name, deployment):
            return False
        node = self.nodes[name]
        if self._device_room(node, deployment) >= _needed(deployment):
            return True
        return len(self.left(node)) >= deployment.devices and self.is_too_large(deployment)

    def is_too_large(self, deployment: Deployment) -> bool:
        """Return whether no node has an accelerator with so much memory, or can do without one."""
        found = self._too_large.get(deployment.name)
        if found is None:
            found = self._too_large[deployment.name] = not any(
                self.is_for(other, deployment) and is_large_enough(other, deployment)
                for other in self._places(deployment)
            )
        return found

    def _places(self, deployment: Deployment) -> list[Node]:
        """Return the nodes that are alive; if it computes on several accelerators, those that have some."""
        if deployment.devices == 1:
            return self._alive
        found = self._with_devices.get(deployment.device_kind)
        if found is None:
            found = [node for node in self._alive if node.devices and _is_kind(node, deployment)] or self._alive
            self._with_devices[deployment.device_kind] = found
        return found

    def may_start(self, deployment: Deployment) -> bool:
        """Return whether an instance could start somewhere if all others ended. Other programs may have the room."""
        return self.is_too_large(deployment) or any(
            self.is_for(node, deployment)
            and is_large_enough(node, deployment)
            and self._most_usable(node, deployment) >= self.slots(node.name, deployment)
            for node in self._places(deployment)
        )

    def _most_usable(self, node: Node, deployment: Deployment) -> int:
        if not node.device_bytes or not node.computes_on_device(deployment.device):
            return node.slots if node.computes_on_device(deployment.device) else 1
        needed = needed_bytes(deployment)
        return node.slots - sum(free < needed for free in node.device_free_bytes)

    def on_accelerators(self, deployment: Deployment) -> Deployment | None:
        """Return the deployment as one that starts on accelerators alone, or None if that makes no difference."""
        if deployment.device != "auto" or not self.index.is_mixed:
            return None
        self.is_too_large(deployment)  # for all processors
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
        return self._choose(deployment, planned)

    def waits(self, deployment: Deployment) -> bool:
        """Return whether a start waits for an accelerator where processors are free.

        It does if it computes on several, and if an accelerator that is large enough becomes free: an instance ends
        there, or has ended, and the node has not said yet what is free by now.
        """
        if deployment.devices > 1 and any(node.devices and _is_kind(node, deployment) for node in self._alive):
            return True
        return any(self.is_for(node, deployment) and is_large_enough(node, deployment) for node in self._emptying)

    @cached_property
    def _alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.state == "alive"]

    @cached_property
    def _emptying(self) -> list[Node]:
        """The nodes of which an accelerator becomes free."""
        return [
            node
            for node in self._alive
            if node.returning
            or any(one.state == "draining" and node.computes_on_device(one.device) for one in node.instances)
        ]

    def _choose(self, deployment: Deployment, planned: str | None) -> str | None:
        """Return the best node, if possible one on which it takes no place that a larger model needs."""
        has_failed = (deployment.devices, deployment.device_kind) in self._most_room  # a model that needs as many
        if has_failed and self.most_room(deployment) < self.least_room(deployment):
            return None
        found = self._fast_node(deployment, planned)
        if found is not None or self.most_room(deployment) < self.least_room(deployment):
            return found
        return self._slow_node(deployment)

    def _rivals(self, deployment: Deployment) -> list[Rival]:
        key = needed_bytes(deployment), deployment.devices, deployment.device_kind
        if deployment.device == "cpu":
            return []
        if key not in self._rivals_of:
            alike = len(self._sizes) <= 1 and self.most_devices <= deployment.devices
            self._rivals_of[key] = [] if alike else self._needs.rivals(deployment)
        return self._rivals_of[key]

    @cached_property
    def _sizes(self) -> list[int]:
        return [size for size, count in self.index.sizes.items() if count > 0]

    @cached_property
    def _needs(self) -> Needs:
        return Needs(self.deployments, self._sizes)

    def _costs(self, name: str, deployment: Deployment) -> int:
        """Return how many kinds of larger models lose a place if an instance starts on a node."""
        node, larger = self.nodes[name], self._rivals(deployment)
        if not larger or not node.computes_on_device(deployment.device):
            return 0
        before = self.left(node) if node.device_bytes else (FreeDevice(0),) * self.free_slots(name)
        needed, devices = needed_bytes(deployment), deployment.devices
        key = needed, devices, deployment.device_kind, node.device_kind, node.device_bytes > 0, before
        if key not in self._costs_of:
            after = left_over(before, devices, needed)
            self._costs_of[key] = sum(rival.places(node, after) < rival.places(node, before) for rival in larger)
        return self._costs_of[key]

    def _fast_node(self, deployment: Deployment, planned: str | None) -> str | None:
        """Return the best node of those on which the fewest kinds of larger models lose a place."""
        least, held, best, is_chosen = math.inf, None, None, False
        for server in self.holders(deployment, planned):
            if self.can_hold(server.node, deployment) and (cost := self._costs(server.node, deployment)) < least:
                least, held = cost, server.node
        room_bytes = self.least_room(deployment)

        def may_suit(name: str) -> bool:
            if room_bytes and deployment.device != "cpu" and self.room(name, deployment.devices) < room_bytes:
                return False
            cost = self._costs(name, deployment)
            return cost < least or (cost == least and best is not None and not is_chosen)

        for seen, server in enumerate(self.others(deployment, may_suit) if least else ()):
            if server.free_bytes < deployment.size_bytes or not self.can_hold(server.node, deployment):
                continue
            cost = self._costs(server.node, deployment)
            if cost < least:
                least, best, is_chosen = cost, server, False
            elif best is not None and server.s_per_byte < best.s_per_byte:
                best = server
            is_chosen |= seen >= MOST_CANDIDATES or server.node not in self._added
            if is_chosen and not least:
                break
        return best.node if best else held

    def _slow_node(self, deployment: Deployment) -> str | None:
        """Return a node where the start is slow, or makes other starts slow. It is better than none."""
        for name in self._candidates(deployment):
            if self._space(self.nodes[name]) >= deployment.size_bytes and self.can_hold(name, deployment):
                return name
        return self._after_eviction(deployment)

    def _after_eviction(self, deployment: Deployment) -> str | None:
        """Return a node that can drop copies of the pool to make room for the weights: those unused for the longest."""
        found: list[tuple[float, str]] = []
        for name in self._candidates(deployment):
            if name in self._added or not self.can_hold(name, deployment):
                continue
            node = self.nodes[name]
            drops = evict(node, deployment.size_bytes, self.by_url, pinned=True)
            if drops is None:
                continue
            gone = {drop.url for drop in drops}
            found.append((max(copy.used_at_s for copy in node.copies if copy.url in gone), name))
            if len(found) == MOST_CANDIDATES:
                break
        return min(found)[1] if found else None

    def _can_run(self, name: str, deployment: Deployment) -> bool:
        free = self.free_slots(name, deployment.device)
        return free > 0 and free >= self.slots(name, deployment) and self.is_for(self.nodes[name], deployment)

    def slots(self, name: str, deployment: Deployment) -> int:
        """Return how many of a node's slots an instance takes."""
        return deployment.devices if self.nodes[name].computes_on_device(deployment.device) else 1

    def usable_slots(self, node: Node, deployment: Deployment) -> int:
        """Return how many free slots of a node have room for an instance, or its part of one."""
        free = self.free_slots(node.name, deployment.device)
        if not node.device_bytes or not node.computes_on_device(deployment.device):
            return max(free, 0)
        return sum(one.free_bytes >= self.least_room(deployment) for one in self.left(node))

    def lacking(self, node: Node, deployment: Deployment) -> int:
        """Return how many slots an instance lacks on a node once those that end there have ended; at most 0: none."""
        on_device = node.computes_on_device(deployment.device)
        ending = sum(
            one.slots
            for one in node.instances
            if one.state == "draining" and node.computes_on_device(one.device) == on_device
        )
        soon = ending + (node.returning if on_device else 0)
        return self.slots(node.name, deployment) - self.usable_slots(node, deployment) - soon

    @staticmethod
    def is_for(node: Node, deployment: Deployment) -> bool:
        """Return whether a node is of the kind that a deployment asks for, and has what it computes on."""
        if deployment.device == "cuda" and not node.devices:
            return False
        if deployment.devices > 1 and node.devices_apart and deployment.device != "cpu":
            return False
        return _is_kind(node, deployment)

    def _candidates(self, deployment: Deployment) -> Candidates:
        """Return the nodes with a free slot, the fastest links first, but those that fetch something last."""
        return self._on_processors if deployment.device == "cpu" else self._on_any

    @cached_property
    def _on_any(self) -> Candidates:
        return Candidates(self._in_order(lambda name: name in self.index.free), self.free_slots)

    @cached_property
    def _on_processors(self) -> Candidates:
        """The candidates for instances that use no accelerator: nodes without any come first."""
        beside, free = self.index.free_processors, self.index.free
        names = self._in_order(lambda name: name in beside or (name in free and not self.nodes[name].devices))
        ordered = sorted(names, key=lambda name: bool(self.nodes[name].devices))
        return Candidates(iter(ordered), lambda name: self.free_slots(name, "cpu"))

    def _in_order(self, is_free: Callable[[str], bool]) -> Iterator[str]:
        """Yield the candidates in order."""
        if not self.contention_aware:
            yield from (name for name in self.index.by_name if is_free(name))
            return
        fetching = {name for name, _ in self.index.arriving}
        busy = {name: self.bytes_per_s(name) for name in fetching if is_free(name)}
        yield from (name for name in self.index.by_link if is_free(name) and name not in fetching)
        yield from sorted(busy, key=lambda name: (-busy[name], name))

    def _fetching(self, node: Node) -> list[Fetching]:
        """Return what is fetched on a node's link. A size that the node does not say yet is known of the model.

        Of a group's worker, the deadline is for its own layers. Those of the others follow only in one that becomes an
        instance, and are waited for by nobody.
        """
        found = list(self._added[node.name]) if node.name in self._added else []
        for copy in node.copies:
            deployment = self.by_url.get(copy.url)
            total = copy.total_bytes or (deployment.size_bytes if deployment is not None else 0)
            if copy.is_complete or copy.fetched_bytes >= total:
                continue
            missing, deadline = total - copy.fetched_bytes, self.deadlines_s.get((node.name, copy.url), math.inf)
            if copy.layers is not None and deployment is not None and deployment.layers:
                own = round(total * (copy.layers[1] - copy.layers[0]) / deployment.layers) - copy.fetched_bytes
                if own > 0:
                    missing = own
                elif any(one.full for one in node.instances if one.model == deployment.name):
                    deadline = math.inf
                else:
                    continue
            found.append(Fetching(copy.url, missing, deadline))
        return found

    def _arrival_rate(self, deployment: Deployment, missing: int, node: Node) -> float:
        """Return the bandwidth at which a fetch of the whole model would end when the missing bytes have come."""
        if missing <= 0:
            return math.inf
        share = node.link_bytes_per_s / max(len(self._fetching(node)), 1)
        return share * max(deployment.size_bytes, missing) / missing


def _is_kind(node: Node, deployment: Deployment) -> bool:
    return deployment.device_kind in ("", node.device_kind)


def _needed(deployment: Deployment) -> int:
    """Return the bytes that a whole instance takes of its accelerators, beside the overhead of each."""
    return deployment.size_bytes + deployment.kv_bytes


def room_shape(node: Node) -> object:
    """Return what ``is_for`` and ``is_large_enough`` go by: the same for nodes on which the same models have room."""
    return node.device_kind, node.devices, node.devices_apart, node.device_bytes, node.device_sizes


def is_large_enough(node: Node, deployment: Deployment) -> bool:
    """Return whether a whole instance has room on a node's accelerators when they are empty, or needs none."""
    if not node.device_bytes or not node.computes_on_device(deployment.device):
        return True
    largest = node.sizes[: deployment.devices]
    return len(largest) == deployment.devices and _for_model(min(largest), deployment) >= _needed(deployment)


def _for_model(device_bytes: int, deployment: Deployment) -> int:
    """Return the bytes for weights, keys and values on the accelerators of an instance, by those of each."""
    return max(device_bytes - DEVICE_OVERHEAD_BYTES, 0) * deployment.devices
