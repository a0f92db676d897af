"""Indexes over the copies and instances of a cluster of any size, kept from one tick to the next."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from .claims import shape_of
from .state import Copy, Deployment, Instance, Node, Processor


class Catalog:
    """The deployments by URL, the first one for each, and the names of those that always have instances."""

    def __init__(self, deployments: dict[str, Deployment]) -> None:
        self.deployments = deployments
        self.by_url: dict[str, Deployment] = {}
        for deployment in deployments.values():
            self.by_url.setdefault(deployment.url, deployment)
        self.total_bytes = sum(deployment.size_bytes for deployment in self.by_url.values())
        self.most_devices = max((deployment.devices for deployment in deployments.values()), default=1)
        self.always = [name for name, deployment in deployments.items() if deployment.min > 0]


class Index:
    """The copies by URL, and the instances by model.

    The index depends on the nodes alone. ``update`` makes it match any state, whatever it saw before, and looks only at
    nodes that are other objects than last time.
    """

    def __init__(self) -> None:
        self.holders: defaultdict[str, dict[str, Copy]] = defaultdict(dict)  # URL → node → copy
        self.instances: defaultdict[str, dict[str, Instance]] = defaultdict(dict)  # model → id → on nodes that stay
        self.leaving: defaultdict[str, dict[str, Instance]] = defaultdict(dict)  # model → id → on nodes that drain
        self.groups: defaultdict[str, dict[str, Instance]] = defaultdict(dict)  # group → id → its workers
        self.changed: dict[str, Instance] = {}  # id → on nodes that stay, of deployments that have changed
        self.marks: dict[str, object] = {}  # model → an object that is replaced whenever the model's instances change
        self.arriving: dict[tuple[str, str], Copy] = {}  # (node, URL) → copy that is not complete
        self.pinned_bytes: dict[str, int] = {}  # node → of the parameter pool
        self.shapes: Counter[tuple[str, int]] = Counter()  # (kind, accelerators) → nodes that are alive
        self.sizes: Counter[int] = Counter()  # memory → accelerators that have so much, of nodes that are alive
        self.processors: Counter[Processor] = Counter()  # of nodes that are alive
        self.memory_bytes = 0  # of nodes that are alive, for copies in host memory
        self.unlimited = 0  # nodes that are alive and keep all copies
        self.is_short = False  # the memory cannot hold all deployed models
        self.free: dict[str, int] = {}  # node → free slots, if it has any: accelerators, or its processor without any
        self.free_processors: set[str] = set()  # nodes with accelerators on whose processor no instance computes
        self.paced: set[str] = set()  # nodes that send weights with a limit, and can be told to
        self.touched: set[str] | None = None  # URLs whose copies the pool has to look at; None: all
        self.waiting: frozenset[str] = frozenset()  # URLs for which the pool found no node with room
        self.roomier = True  # a node may have more room than when the pool last found none
        self.joined = True  # a node has joined since the pool was last seen to be spread evenly
        self._seen: dict[str, Node] = {}
        self._catalog = Catalog({})
        self._by_link: list[str] | None = None
        self._by_name: list[str] | None = None

    @property
    def by_name(self) -> list[str]:
        """The nodes' names in alphabetical order."""
        if self._by_name is None:
            self._by_name = sorted(self._seen)
        return self._by_name

    @property
    def by_link(self) -> list[str]:
        """The nodes' names, those with accelerators first, and of them those with the fastest links."""
        if self._by_link is None:
            seen = self._seen
            self._by_link = sorted(seen, key=lambda name: (not seen[name].devices, -seen[name].link_bytes_per_s, name))
        return self._by_link

    @property
    def is_mixed(self) -> bool:
        """Whether there are nodes with accelerators and nodes without, among those that are alive."""
        return len({processor.on_gpu for processor, count in self.processors.items() if count}) == 2

    def count_processors(self, deployment: Deployment) -> int:
        """Return how many kinds of processors there are for the deployment's instances."""
        kinds = {
            Processor(False, kind) if deployment.device == "cpu" else Processor(on_gpu, kind, name)
            for (on_gpu, kind, name), count in self.processors.items()
            if count and deployment.device_kind in ("", kind) and (on_gpu or deployment.device != "cuda")
        }
        return len(kinds)

    def catalog(self, deployments: Mapping[str, Deployment]) -> Catalog:
        """Return the catalog of these deployments, which is made anew only if they have changed."""
        if self._catalog.deployments != deployments:
            self._catalog = Catalog(dict(deployments))
            self.touched = None
            self.marks = {name: mark for name, mark in self.marks.items() if name in deployments}
        short = not self.unlimited and self._catalog.total_bytes > self.memory_bytes
        if short != self.is_short:
            self.is_short, self.touched, self.joined = short, None, True
        return self._catalog

    def update(self, nodes: Mapping[str, Node], changed: Collection[str] | None = None) -> None:
        """Make the index match these nodes. ``changed`` are the names to look at; see ``ClusterState.changed``."""
        seen = self._seen
        looked: Iterable[tuple[str, Node]] = nodes.items()
        if changed is not None and seen:
            looked = [(name, nodes[name]) for name in changed if name in nodes]
        for name, node in [(name, node) for name, node in looked if seen.get(name) is not node]:
            last = seen.get(name)
            seen[name] = node
            paced = node.pace_bytes_per_s is not None and node.state != "lost"
            (self.paced.add if paced else self.paced.discard)(name)
            if last is None:
                self.joined = True
                self._by_link = self._by_name = None
                self._touch(node)
                self._mark(node)
                self._add(node)
            else:
                self._replace(last, node)
        if len(seen) != len(nodes):
            for name in [name for name in seen if name not in nodes]:
                last = seen.pop(name)
                self.paced.discard(name)
                self._by_link = self._by_name = None
                self._touch(last)
                self._mark(last)
                self._forget(last)

    def _replace(self, last: Node, node: Node) -> None:
        copies = last.copies is node.copies or last.copies == node.copies
        instances = last.instances is node.instances or last.instances == node.instances
        alike = _devices(last) == _devices(node)
        self.roomier |= node.free_bytes > last.free_bytes
        if copies and instances and alike and last.memory_bytes == node.memory_bytes:
            if last.link_bytes_per_s != node.link_bytes_per_s:
                self._by_link = None
            return
        if last.state != node.state:
            self.joined = True
        if (last.link_bytes_per_s, last.devices) != (node.link_bytes_per_s, node.devices):
            self._by_link = None
        if self.touched is not None and not _same_for_the_pool(last, node, copies, instances):
            self._touch(last, node)
        if not alike or not (instances or _run_the_same(last, node)):
            self._mark(last, node)
        if not alike or last.memory_bytes != node.memory_bytes:
            self._forget(last)
            self._add(node)
            return
        if not copies:
            self._forget_copies(last)
            self._add_copies(node)
        if not instances:
            self._forget_instances(last)
            self._add_instances(node)

    def _touch(self, *nodes: Node) -> None:
        self.roomier = True
        if self.touched is not None:
            self.touched.update(copy.url for node in nodes for copy in node.copies)

    def _mark(self, *nodes: Node) -> None:
        for node in nodes:
            for instance in node.instances:
                self.marks[instance.model] = object()

    def _add(self, node: Node) -> None:
        if node.state == "alive":
            self.shapes[shape_of(node)] += 1
            for size in node.sizes:  # Counter.update costs more where there are few
                self.sizes[size] += 1
            self.processors[node.processor("auto")] += 1
            self.memory_bytes += node.memory_bytes
            self.unlimited += not node.memory_bytes
        self._add_copies(node)
        self._add_instances(node)

    def _add_copies(self, node: Node) -> None:
        if node.state == "lost":
            return
        pinned = 0
        for copy in node.copies:
            self.holders[copy.url][node.name] = copy
            if not copy.is_complete:
                self.arriving[node.name, copy.url] = copy
            if copy.pinned:
                pinned += copy.total_bytes
        if node.state == "alive":
            self.pinned_bytes[node.name] = pinned

    def _add_instances(self, node: Node) -> None:
        if node.state == "lost":
            return
        instances = self.instances if node.state == "alive" else self.leaving
        for instance in node.instances:
            instances[instance.model][instance.id] = instance
            if instance.changed and node.state == "alive":
                self.changed[instance.id] = instance
            if instance.group is not None:
                self.groups[instance.group][instance.id] = instance
        free = node.free_slots()
        if free > 0:
            self.free[node.name] = free
        if node.devices and node.state == "alive" and all(one.device != "cpu" for one in node.instances):
            self.free_processors.add(node.name)

    def _forget(self, node: Node) -> None:
        if node.state == "alive":
            self.shapes[shape_of(node)] -= 1
            self.sizes.subtract(node.sizes)
            self.processors[node.processor("auto")] -= 1
            self.memory_bytes -= node.memory_bytes
            self.unlimited -= not node.memory_bytes
        self._forget_copies(node)
        self._forget_instances(node)

    def _forget_copies(self, node: Node) -> None:
        for copy in node.copies:
            _discard(self.holders, copy.url, node.name)
            self.arriving.pop((node.name, copy.url), None)
        self.pinned_bytes.pop(node.name, None)

    def _forget_instances(self, node: Node) -> None:
        if node.state == "lost":
            return
        for instance in node.instances:
            _discard(self.instances if node.state == "alive" else self.leaving, instance.model, instance.id)
            self.changed.pop(instance.id, None)
            if instance.group is not None:
                _discard(self.groups, instance.group, instance.id)
        self.free.pop(node.name, None)
        self.free_processors.discard(node.name)


def _devices(node: Node) -> tuple[object, ...]:
    devices = node.devices, node.devices_lost, node.device_bytes, node.device_sizes
    return node.state, node.device_kind, node.device_name, devices


def _run_the_same(last: Node, node: Node) -> bool:
    """Return whether the two states of a node have the same instances, except for the requests that they run."""
    if last.instances is node.instances:
        return True
    return [_identity(instance) for instance in last.instances] == [_identity(instance) for instance in node.instances]


def _identity(instance: Instance) -> tuple[object, ...]:
    return (
        instance.id,
        instance.model,
        instance.state,
        instance.role,
        instance.group,
        instance.full,
        instance.version,
        instance.slots,
        instance.device,
        instance.changed,
    )


def _same_for_the_pool(last: Node, node: Node, copies: bool, instances: bool) -> bool:
    """Return whether two states of a node are the same for the parameter pool.

    ``copies`` and ``instances`` say whether these are equal.
    """
    if last.state != node.state or last.memory_bytes != node.memory_bytes:
        return False
    if not instances and [item.model for item in last.instances] != [item.model for item in node.instances]:
        return False
    return copies or [_held(copy) for copy in last.copies] == [_held(copy) for copy in node.copies]


def _held(copy: Copy) -> tuple[object, ...]:
    return copy.url, copy.version, copy.pinned, copy.is_complete, copy.layers


def _discard(index: dict[str, dict[str, Any]], key: str, name: str) -> None:
    found = index.get(key)
    if found is not None:
        found.pop(name, None)
        if not found:
            del index[key]
