"""What the controller knows about the cluster's nodes and their instances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from medusa_runtime.errors import ClusterError, shown

if TYPE_CHECKING:
    from .live import LivePlace

_CALL_S = 10.0


class Nodes(Protocol):
    """The way to the nodes; in a cluster it leads through Ray's actors."""

    async def servers(self) -> dict[str, str] | None:
        """The nodes that live, each with the URL of its node server; None when that cannot be found out now."""

    async def status(self, node: str, url: str, timeout_s: float) -> Mapping[str, Any]:
        """Ask a node server for its status, past what carries orders. Raises ClusterError when it does not answer."""

    async def call(self, node: str, request: dict[str, Any], timeout_s: float) -> Any:
        """Have a node server answer a request of its control socket. Raises ClusterError when it cannot be reached."""

    async def forget(self, node: str) -> None:
        """Give up a node that was lost, or that nobody uses. When it is told something, it is as if it were new."""

    async def request_nodes(self, total: int) -> None:
        """Have an autoscaler, where there is one, add nodes until there are so many; 0: none are missing.

        Raises ClusterError when it cannot be asked.
        """


@dataclass
class KnownNode:
    """A node as it was seen last. Times are on the monotonic clock.

    ``lost_at``: when it was no longer there. ``joined``: it was seen and could be told something. ``reached``: orders
    have reached it since it was there. ``silent``: it serves requests, but orders have not reached it for a while,
    because Ray is away on it. ``spare``: it was given back to the autoscaler, which ends it once nothing runs there.
    """

    name: str
    status: Mapping[str, Any] = field(default_factory=dict)
    seen_at: float = 0.0  # monotonic, of the status
    lost_at: float | None = None
    joined: bool = False
    reached: bool = False
    silent: bool = False
    given_up: bool = False
    drained_told: bool = False
    spare: bool = False
    excluded: set[tuple[str, str]] = field(default_factory=set)  # (model, peer): wrong bytes, as was told
    starts: dict[str, dict[str, float]] = field(default_factory=dict)  # what was learned from the instances it shows

    @property
    def url(self) -> str:
        return str(self.status.get("url", ""))

    def models(self) -> list[Mapping[str, Any]]:
        return list(self.status.get("models", ()))


@dataclass
class KnownInstance:
    """An instance that was decided on, or that a node has reported.

    ``group``: the id of the group that it is a worker of, with its rank and layers in it, until the group has ended.
    ``predicted_s``: the time to its first token, from cold, with so many ``workers``. ``loading``: its group's leader
    does not have all layers yet, or it ``helps`` another instance until it has them itself.
    ``live``: where it waits for one that helps it.
    """

    id: str
    model: str
    node: str
    state: str  # starting, ready, draining
    since: float  # seconds since the epoch
    running: int = 0
    confirmed: bool = False  # the node has shown it in a status
    role: str = "both"
    version: str = ""  # of the model that it has loaded; "" until its node knows
    group: str | None = None
    rank: int = 0
    layers: tuple[int, int] | None = None
    full: bool = True
    predicted_s: float = 0.0
    workers: int = 1
    loading: bool = False
    live: LivePlace | None = None
    helps: str | None = None

    def take_group(self, shown: Mapping[str, Any]) -> None:
        """Take over what its node shows of the group that it is in, as after a restart of the controller."""
        self.group, self.rank, self.full = str(shown["id"]), int(shown["rank"]), bool(shown["full"])
        self.workers, self.loading = int(shown["size"]), self.rank > 0
        start, _, stop = str(shown.get("layers") or "").partition(":")
        self.layers = (int(start), int(stop)) if stop else None


@dataclass
class KnownFetch:
    """A fetch that was decided on, until the node shows the model in its status."""

    node: str
    url: str
    sources: tuple[str, ...]
    pin: bool
    at: float  # monotonic
    layers: tuple[int, int] | None = None  # which come first; None: all, in order


@dataclass
class Gateway:
    name: str
    url: str | None
    seen: float  # seconds since the epoch
    seen_at: float  # monotonic
    loads: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


async def group_place(nodes: Nodes, node: KnownNode) -> str:
    """HOST:PORT where an instance on this node may wait for others. Raises ClusterError when the node names none."""
    found = await nodes.call(node.name, {"op": "group_port"}, _CALL_S)
    host = str(node.status.get("address", "")).rpartition(":")[0]
    port = found.get("port") if isinstance(found, dict) else None
    if not host or not isinstance(port, int):
        raise ClusterError(f"expected a port for a group from the node {node.name}, found {shown(found)}")
    return f"{host}:{port}"
