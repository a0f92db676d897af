"""A simulated machine, with its copies and instances, and its form for the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..policy.sizing import DEVICE_OVERHEAD_BYTES
from ..policy.state import Copy, Instance, Layers, Node, Role
from .fleet import Machine, Model
from .network import Flow, Link
from .profiles import SlowerSpeed, Speed
from .serving import Server


@dataclass(slots=True, eq=False)
class SimCopy:
    """Weights on a node. ``base``: bytes that were there before the present flow began."""

    url: str
    total: int
    layers: Layers | None = None
    pinned: bool = False
    base: float = 0.0
    flow: Flow | None = None
    complete: bool = False
    grouped: bool = False  # its first layers came for a worker of a group
    used_at_s: float = 0.0
    sources: tuple[str, ...] = ()
    then: list[Callable[[], None]] = field(default_factory=list)
    last: Copy | None = None  # as the policy saw it

    @property
    def fetched(self) -> float:
        return self.base + (self.flow.progress if self.flow is not None else 0.0)

    def to_policy(self) -> Copy:
        """Return the copy as the policy sees it. It is the same object as long as nothing has changed."""
        last = self.last
        if (
            last is not None
            and self.complete
            and last.fetched_bytes == self.total
            and last.pinned == self.pinned
            and last.used_at_s == self.used_at_s
        ):
            return last
        fetched = self.total if self.complete else min(int(self.fetched), self.total - 1)
        self.last = Copy(
            self.url, self.total, fetched, "1", self.layers, "host", self.pinned, self.used_at_s, self.sources
        )  # fmt: skip
        return self.last


@dataclass(slots=True, eq=False)
class SimInstance:
    """An instance, or a worker of a group. ``server`` is there once it is ready; a group's workers share one."""

    id: str
    model: int
    name: str
    node: SimNode
    began_s: float
    since_s: float
    role: Role
    layers: Layers | None
    group: str | None
    full: bool
    partner: str | None
    state: str = "starting"
    server: Server | None = None
    slower: float = 1.0  # how many times longer than the average its start takes

    def to_policy(self) -> Instance:
        running = self.server.running if self.server is not None else 0
        return Instance(
            self.id,
            self.name,
            self.node.name,
            self.state,  # type: ignore[arg-type]
            self.since_s,
            self.role,
            self.layers,
            self.group,
            self.full,
            running,
        )


def speed_of(workers: Sequence[SimInstance], model: Model, *, follows_memory: bool = False) -> Speed:
    """Return how fast an instance computes, or the workers of a group one after the other.

    ``follows_memory``: a worker with memory for its own layers alone has as small a part of the computing power. It
    takes as long for its layers as an instance for all of them (ParaServe, Eq. 1 and 2).
    """
    speed, size = model.on(workers[0].node.machine.device).speed, len(workers)
    if size == 1 or not follows_memory:
        return speed
    full = sum(worker.full for worker in workers)
    return SlowerSpeed(speed, size - full + full / size)


class SimNode:
    """A machine with its links, copies and instances. ``always``: copies that are on every node (AllCache)."""

    def __init__(self, name: str, machine: Machine, domain: str, always: tuple[Copy, ...] = ()) -> None:
        self.name, self.machine, self.domain = name, machine, domain
        self.egress, self.ingress = Link(machine.link_bytes_per_s), Link(machine.link_bytes_per_s)
        self.disk = Link(machine.store_bytes_per_s)
        self.copies: dict[str, SimCopy] = {}
        self.instances: dict[str, SimInstance] = {}
        self._pace_bytes_per_s: float | None = None
        self.dirty = True
        self._always = always
        self._seen: Node | None = None

    @property
    def used_bytes(self) -> int:
        return sum(copy.total for copy in self.copies.values())

    def can_run(self, model: Model) -> bool:
        """Return whether a device is free here that a model can use, and has room for its weights."""
        machine = self.machine
        room = not machine.device_bytes or machine.device_bytes >= model.profile.size_bytes + DEVICE_OVERHEAD_BYTES
        return len(self.instances) < machine.devices and model.device in ("", machine.device) and room

    def runs(self, url: str) -> bool:
        """Return whether an instance here uses these weights."""
        return any(f"m://{instance.name}" == url for instance in self.instances.values())

    def show_pace(self, bytes_per_s: float | None) -> None:
        """Show the policy a limit for the weights that are sent. It limits nothing: only weights are simulated."""
        self._pace_bytes_per_s = bytes_per_s
        if self._seen is not None:
            self._seen = replace(self._seen, pace_bytes_per_s=bytes_per_s)

    def to_policy(self) -> Node:
        """Return the node as the policy sees it. It is the same object as long as nothing has changed."""
        if self._seen is not None and not self.dirty:
            return self._seen
        machine = self.machine
        self.dirty = any(copy.flow is not None for copy in self.copies.values())
        self._seen = Node(
            self.name,
            leaf=machine.leaf,
            fast_domain=self.domain,
            link_bytes_per_s=machine.link_bytes_per_s,
            memory_bytes=machine.memory_bytes,
            memory_used_bytes=self.used_bytes,
            devices=machine.devices,
            device_kind=machine.device,
            device_bytes=machine.device_bytes,
            device_free_bytes=(machine.device_bytes,) * (machine.devices - len(self.instances)),
            pace_bytes_per_s=self._pace_bytes_per_s,
            copies=(*self._always, *(copy.to_policy() for copy in self.copies.values())),
            instances=tuple(instance.to_policy() for instance in self.instances.values()),
        )
        return self._seen
