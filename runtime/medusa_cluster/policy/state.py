"""The policy's view of a cluster, and the decisions that it can take.

The controller fills these dataclasses from the nodes' status and the gateways' loads; the simulator fills them from its
model. Times are seconds on the caller's clock, the same for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from medusa_runtime.state.stage_times import StageTimes

from ..deployment import Device

NodeState = Literal["alive", "draining", "lost"]
InstanceState = Literal["starting", "ready", "draining"]
Role = Literal["both", "prefill", "decode"]
MOST_PREFILLING = 8  # instances, for one that decodes
Layers = tuple[int, int]  # from the first up to, and without, the second


class Processor(NamedTuple):
    """What an instance computes on: ``kind`` is the operator's word for it, ``name`` the GPU's own.

    Different ones may give different answers. So the workers of a group compute on the same, and so do live pairs.
    """

    on_gpu: bool = False
    kind: str = ""
    name: str = ""

    @classmethod
    def of(cls, gpus: int, kind: str, name: str, device: Device) -> Processor:
        """Return what an instance with this ``--device`` computes on, by the GPUs of its node."""
        on_gpu = gpus > 0 and device != "cpu"
        return cls(on_gpu, kind, name if on_gpu else "")


class FreeDevice(NamedTuple):
    """An accelerator that no instance was given: how much of its memory is free, and how much it has."""

    free_bytes: int
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Copy:
    """A model's weights on a node, perhaps still on their way."""

    url: str
    total_bytes: int
    fetched_bytes: int
    version: str = ""  # of the object in the store; "" while nothing is known about it
    layers: Layers | None = None  # None: the whole model
    place: Literal["host", "device"] = "host"
    pinned: bool = False  # belongs to the parameter pool; else the node may evict it
    used_at_s: float = 0.0
    sources: tuple[str, ...] = ()  # while it is fetched: the names of the nodes it reads from; the store is implied
    bytes_per_s: float = 0.0  # while it is fetched

    @property
    def is_complete(self) -> bool:
        return self.layers is None and 0 < self.total_bytes <= self.fetched_bytes


@dataclass(frozen=True, slots=True)
class Instance:
    """A served model, or with ``layers`` one worker of a group that serves it together."""

    id: str
    model: str  # the deployment's name
    node: str
    state: InstanceState
    since_s: float = 0.0  # when it came into this state
    role: Role = "both"
    layers: Layers | None = None  # None: all
    group: str | None = None  # the group's id
    full: bool = True  # has memory for the whole model, also while it holds some of its layers
    running: int = 0  # requests
    version: str = ""  # of the model that it has loaded; "": not known
    slots: int = 1  # of its node: the accelerators that it takes, or one processor
    device: Device = "auto"  # what it was told to compute on
    deserted: bool = False  # one that prefilled for it has lost it: perhaps it hangs
    changed: bool = False  # its deployment has changed since its start, so it is replaced
    url: str = ""  # of its model; "": not known


@dataclass(frozen=True, slots=True)
class Node:
    """A machine. ``serves_out`` and ``serves_in``: its link carries activations, keys or values in that direction.

    Each of its ``devices`` is given to one instance at a time, with all of its memory. Its processor runs one instance,
    where it has accelerators only one that uses none.
    """

    name: str
    address: str = ""
    state: NodeState = "alive"
    drain_s: float | None = None  # for running requests, when it drains; None: as in Options
    leaf: str = ""  # the switch above it; links inside a leaf are as fast as the nodes' own
    fast_domain: str = ""  # nodes of one domain share a link that is much faster than the network; "": none
    link_bytes_per_s: float = 1e9
    load_bytes_per_s: float = math.inf  # host memory → device
    memory_bytes: int = 0  # for copies in host memory
    memory_used_bytes: int = 0
    devices: int = 0  # accelerators
    devices_lost: int = 0  # of those, that do not answer, and that no instance has
    device_kind: str = ""  # as in Deployment.device_kind
    device_name: str = ""  # of its accelerators; "": not known
    devices_apart: bool = False  # no instance can have several of them: they are parts of one
    device_bytes: int = 0  # the memory of the smallest of them; 0: not known
    device_sizes: tuple[int, ...] = ()  # the memory of each, the largest first; (): all have device_bytes
    # What each of those has free that no instance was given, the most first. One that was just given back comes later.
    device_free_bytes: tuple[int, ...] = ()
    device_free_sizes: tuple[int, ...] = ()  # the memory of each of these; (): all have device_bytes
    serves_out: bool = False
    serves_in: bool = False
    pace_bytes_per_s: float | None = None  # the limit for weights that it sends
    stays: bool = False  # no autoscaler may end it: the head
    spare: bool = False  # it drains because it was given back to the autoscaler
    copies: tuple[Copy, ...] = ()
    instances: tuple[Instance, ...] = ()

    @property
    def slots(self) -> int:
        """How many instances it runs at the same time, of those that use accelerators where there are any."""
        return max(self.devices - self.devices_lost, 0) if self.devices else 1

    def computes_on_device(self, device: Device) -> bool:
        """Return whether an instance here that was started with ``--device`` of this value uses an accelerator."""
        return self.devices > 0 and device != "cpu"

    def free_slots(self, device: Device = "auto") -> int:
        """Return how many slots are free for such instances: accelerators, or processors where they use none."""
        if self.state != "alive":
            return 0
        on_device = self.computes_on_device(device)
        taken = sum(one.slots for one in self.instances if self.computes_on_device(one.device) == on_device)
        return (self.slots if on_device else 1) - taken

    @property
    def sizes(self) -> tuple[int, ...]:
        """The memory of each of its accelerators, the largest first. Empty if it is not known."""
        return self.device_sizes or ((self.device_bytes,) * self.devices if self.device_bytes else ())

    @property
    def free_devices(self) -> tuple[FreeDevice, ...]:
        """Its accelerators that no instance was given, as far as their memory is known."""
        free = self.device_free_bytes
        sizes = self.device_free_sizes if len(self.device_free_sizes) == len(free) else (self.device_bytes,) * len(free)
        return tuple(map(FreeDevice, free, sizes))

    @property
    def returning(self) -> int:
        """How many accelerators no instance has any more, whose free memory is not known yet."""
        return max(self.free_slots() - len(self.device_free_bytes), 0) if self.device_bytes and self.devices else 0

    def processor(self, device: Device) -> Processor:
        """Return what an instance here computes on, if it was started with ``--device`` of this value."""
        return Processor.of(self.devices, self.device_kind, self.device_name, device)

    @property
    def free_bytes(self) -> int:
        return self.memory_bytes - self.memory_used_bytes

    def copy(self, url: str) -> Copy | None:
        return next((copy for copy in self.copies if copy.url == url), None)


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a model's starts on one kind of processor."""

    times: StageTimes
    hop_s: float | None = None  # t_n, as its groups' steps were seen to take; None: the policy's own


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model that the cluster serves under a name."""

    name: str
    url: str
    engine: str = "torch"
    size_bytes: int = 0  # 0: not known yet
    version: str = ""  # of the object in the store; "": not known yet, any copy will do
    layers: int = 0
    min: int = 0
    max: int = 1
    ttft_slo_s: float = math.inf
    tpot_slo_s: float = math.inf
    times: StageTimes | None = None  # stage times of its starts where ``measured`` has none
    measured: Mapping[Processor, Measured] = field(default_factory=dict)
    tokens_per_s: float = 0.0  # prompt tokens that one instance was seen to take at most; 0: not known yet
    concurrency: int = 8  # requests that one instance runs at the same time
    weight: float = 1.0  # of its share when the cluster is full
    device_kind: str = ""  # instances start on nodes of this kind; "": on any
    device: Device = "auto"  # what instances compute on; auto: accelerators where there are any
    devices: int = 1  # accelerators that one instance shares its layers among
    kv_bytes: int = 0  # keys and values, for which an instance needs room on its accelerators
    gpu_groups: bool = True  # its groups' workers can compute on accelerators
    disaggregated: bool = False  # prefill and decode on instances of their own
    may_prefill: bool = True  # else no more instances start in order to prefill

    def on(self, processor: Processor) -> Measured | None:
        """Return what is known of starts on this processor; None if nothing is known of any start."""
        found = self.measured.get(processor)
        return found or (None if self.times is None else Measured(self.times))


@dataclass(frozen=True, slots=True)
class Load:
    """What the gateways report about one model, summed over them."""

    waiting: int = 0  # requests without an instance yet
    running: int = 0
    tokens_per_s: float = 0.0  # prompt tokens that arrive
    unanswered_tokens: float = 0.0  # of prompts whose first token has not come
    waiting_tokens: float = 0.0  # of those that no instance has; known in the simulator alone
    prefilled_per_s: float = 0.0  # prompt tokens of requests whose first token has come
    decoded_per_s: float = 0.0  # tokens that are generated
    kv_use: float = 0.0  # the part of the KV blocks in use, 0 to 1; of decode instances where they are apart
    longest_wait_s: float = 0.0
    last_request_s: float = -math.inf  # when the last request came


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The whole state from which decisions are made. Nodes hold their copies and instances.

    Earlier decisions must be visible here at the next call, even if their nodes have not confirmed them yet: an
    instance as "starting", a copy with its sources and 0 bytes.

    ``changed`` are names of nodes, including all that are other objects than at the last call with the same memory. It
    saves looking at each node of a large cluster. None: any node may be another object.
    """

    nodes: Mapping[str, Node] = field(default_factory=dict)
    deployments: Mapping[str, Deployment] = field(default_factory=dict)
    loads: Mapping[str, Load] = field(default_factory=dict)  # by deployment
    changed: Collection[str] | None = None


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring a model to a node. A copy that is being fetched already goes on from these sources."""

    node: str
    url: str
    sources: tuple[str, ...]  # names of nodes, best first; the store comes last and is implied
    pin: bool = False
    layers: Layers | None = None  # fetch these first; None: all, in order
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Drop:
    """Free the memory of a copy."""

    node: str
    url: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Pin:
    """Make a copy part of the parameter pool, or let it be evicted again."""

    node: str
    url: str
    pinned: bool = True


@dataclass(frozen=True, slots=True)
class StartInstance:
    """Start an instance. The same id twice is the same instance."""

    id: str
    model: str
    node: str
    role: Role = "both"
    layers: Layers | None = None
    group: str | None = None
    full: bool = True  # give it memory for the whole model
    partner: str | None = None  # the instance that it relieves while its own layers arrive
    ttft_s: float = 0.0  # as predicted for a start from cold; 0: nothing is known of it
    device_bytes: int = 0  # for which it needs room on each of its accelerators; 0: not known
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StopInstance:
    """Let an instance finish its requests, for at most ``drain_s``, and end it."""

    id: str
    node: str
    drain_s: float = 30.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ResumeInstance:
    """Let an instance that finishes its requests before it ends go on instead, and take new ones."""

    id: str
    node: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ChangeRole:
    """Turn a prefill instance into a decode instance, or the reverse."""

    id: str
    node: str
    role: Role
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Consolidate:
    """Turn some workers of a group into whole instances, and end the others (ParaServe §6)."""

    group: str
    model: str
    keep: tuple[str, ...]  # ids of instances
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Pace:
    """Limit the weights that a node sends, in bytes a second; None: no limit."""

    node: str
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class RequestNodes:
    """Ask an autoscaler for nodes until there are this many; 0: none are missing.

    ``devices``: how many accelerators each of some of them has, where those that are missing need some.
    """

    total: int
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SetSpare:
    """Let an autoscaler end a node once others have what it holds, or with ``spare=False`` take it back."""

    node: str
    spare: bool = True


Decision = (
    Fetch
    | Drop
    | Pin
    | StartInstance
    | StopInstance
    | ResumeInstance
    | ChangeRole
    | Consolidate
    | Pace
    | RequestNodes
    | SetSpare
)
