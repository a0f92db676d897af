"""The controller's knowledge about nodes, instances, fetches and gateways, and its way to the nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from medusa_runtime.errors import ClusterError, json_excerpt

from ..deployment import Deployment, Device
from ..policy.state import MOST_PREFILLING, Processor

_CALL_S = 10.0
# How long a new instance tries to reach the one that it helps. After that it is an instance like any other.
_FORM_S = {"live": 5.0, "disaggregated": 60.0}


class Nodes(Protocol):
    """The way to the nodes. In a real cluster, orders go through Ray's actors."""

    async def servers(self) -> dict[str, str] | None:
        """Return the live nodes: name → URL of the node server. None if that cannot be found out now."""

    async def status(self, node: str, url: str, timeout_s: float) -> Mapping[str, Any]:
        """Ask a node server for its status, not by the way of orders. Raises ClusterError if it does not answer."""

    async def logs(self, node: str, url: str, log: str | None, after: int | None, timeout_s: float) -> Any:
        """Return what a node server answers of its logs (node/logs.py), not by the way of orders: all, or one's text.

        Raises ClusterError if it does not answer, or has no such log.
        """

    async def call(self, node: str, request: dict[str, Any], timeout_s: float) -> Any:
        """Send a node server a request of its control socket, and return the result.

        Raises ClusterError if it cannot be reached.
        """

    def group_token(self, group: str) -> str:
        """Return the secret by which the members of a group know one another; the same after a restart."""

    async def forget(self, node: str) -> None:
        """Release what belongs to a node that is lost or unused. The next call treats it as a new node."""

    async def request_nodes(self, total: int, gpus: Sequence[int] = ()) -> None:
        """Ask the autoscaler, if there is one, to add nodes until there are ``total``. 0: none are missing.

        ``gpus``: how many GPUs each of some of them must have.

        Raises ClusterError if it cannot be asked.
        """


@dataclass
class KnownNode:
    """A node as it was seen last. Times are by the monotonic clock.

    ``lost_at``: when it was lost. ``joined``: it has answered, and an order has reached it, at least once. ``reached``:
    an order has reached it since it is there. ``silent``: it serves requests, but orders do not reach it, because Ray
    is away there. ``spare``: it was given back to the autoscaler, which ends it once nothing runs there.
    ``claims``: its last status had instances of other nodes.
    """

    name: str
    status: Mapping[str, Any] = field(default_factory=dict)
    seen_at: float = 0.0  # when the status came
    lost_at: float | None = None
    joined: bool = False
    reached: bool = False
    silent: bool = False
    given_up: bool = False
    drained_reported: bool = False
    spare: bool = False
    claims: bool = False
    excluded: set[tuple[str, str]] = field(default_factory=set)  # (URL of a model, peer) that an event was logged for
    routed: tuple[Any, ...] = ()  # its URL and state in the routes
    starts: dict[str, dict[str, float]] = field(default_factory=dict)  # id of an instance in the status → its start
    _shown: tuple[Mapping[str, Any], dict[str, Mapping[str, Any]]] = field(default=({}, {}), repr=False)

    @property
    def url(self) -> str:
        return str(self.status.get("url", ""))

    def processor(self, device: Device) -> Processor:
        """Return what an instance here computes on, if it was started with ``--device`` of this value."""
        return Processor.of(
            int(self.status.get("devices", 0)),
            str(self.status.get("device_kind", "")),
            str(self.status.get("device_name", "")),
            device,
        )

    def models(self) -> list[Mapping[str, Any]]:
        return list(self.status.get("models", ()))

    def shown(self) -> Mapping[str, Mapping[str, Any]]:
        """Return what the last status says of each model that the node has, at least in part, by URL."""
        if self._shown[0] is not self.status:
            self._shown = self.status, {model["url"]: model for model in self.models()}
        return self._shown[1]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address at which an instance waits for others that help it, and the group to which they belong then.

    ``mode`` is that of a ``GroupPlan``: ``live``, with one helper, or ``disaggregated``.
    """

    group: str
    place: str  # HOST:PORT
    mode: str

    @property
    def size(self) -> int:
        return 2 if self.mode == "live" else 1 + MOST_PREFILLING

    def plan(self, rank: int, token: str) -> dict[str, Any]:
        """Return the ``GroupPlan`` of rank 0, which waits, or of another rank, which helps it, as JSON."""
        common = {"group": self.group, "token": token, "leader": self.place, "mode": self.mode}
        return {**common, "rank": rank, "size": self.size, "form_s": _FORM_S[self.mode], "then": "stay"}


@dataclass
class KnownInstance:
    """An instance that was decided on, or that a node has reported.

    ``group`` is the group that it is a worker of, with its ``rank`` and ``layers`` there, until the group ends.
    ``predicted_s`` is the predicted time to the first token of a cold start with so many ``workers``. ``loading``: its
    group's leader does not have all layers yet, or it helps the instance ``helps`` until it has all layers itself.
    ``helping``: it helps that instance, and takes no requests. ``meets`` is where it waits for others that help it.
    ``answers``: it has been ready to answer; before that, requests wait in it.
    ``slots`` are the GPUs that it was lent, or one for the processor, and
    ``device`` is what it was told to compute on. Its deployment may ask for something else by now.
    """

    id: str
    model: str
    node: str
    state: str  # starting, ready, draining
    since_s: float  # when its state began, monotonic
    running: int = 0
    kv_use: float = 0.0  # the part of its KV cache that is in use, 0 to 1
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
    helping: bool = False
    wanted_role: str = "both"  # for which it was started
    has_prefilled: bool = False
    deserted: bool = False  # one that prefilled for it has lost it
    meets: Rendezvous | None = None
    helps: str | None = None  # or has helped: the times of its start say nothing then
    slots: int = 1
    device: Device = "auto"
    device_bytes: int = 0  # that it needs on each of its GPUs; 0: not known
    digest: str = ""  # of the deployment that it was started with; "": not known
    url: str = ""  # its model's
    answers: bool = False

    def set_deployment(self, deployment: Deployment, node: KnownNode, device_bytes: int) -> None:
        """Set what it is started with, and what it takes of its node, until the node says that itself."""
        self.digest, self.url = deployment.digest, deployment.url
        self.device, self.device_bytes = deployment.device, device_bytes
        self.slots = deployment.gpus if node.processor(deployment.device).on_gpu else 1

    def set_pair(self, shown: Mapping[str, Any]) -> None:
        """Set by the node's status what the instance does for another one, or others for it."""
        self.helping, self.helps = shown["helping"], shown["helps"]
        if self.role == "both" and shown["lost"]:  # before the restart of the controller, as far as this one knows
            self.wanted_role, self.has_prefilled = "prefill", True
        if self.role != "decode":  # else it was told to become one, and that takes a moment
            self.role = shown["role"]
        if self.role == "prefill":
            self.wanted_role = "prefill"
        self.loading = self.helping and not (self.role == "prefill" and shown["prefills"])
        meets, mode = shown["meets"], "live" if shown["role"] == "both" else "disaggregated"
        self.meets = None if meets is None else Rendezvous(meets["group"], meets["at"], mode)

    def set_group(self, shown: Mapping[str, Any]) -> None:
        """Set the group from the node's status, as after a restart of the controller."""
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
    layers: tuple[int, int] | None = None  # [start, stop) of the layers that come first; None: all, in order


@dataclass
class Gateway:
    name: str
    url: str | None
    seen_at: float  # monotonic
    loads: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


async def group_address(nodes: Nodes, node: KnownNode) -> str:
    """Return HOST:PORT on a node where an instance can wait for others. Raises ClusterError if the node gives none."""
    found = await nodes.call(node.name, {"op": "group_port"}, _CALL_S)
    host = str(node.status.get("address", "")).rpartition(":")[0]
    port = found.get("port") if isinstance(found, dict) else None
    if not host or not isinstance(port, int):
        raise ClusterError(f"expected a port for a group from the node {node.name}, found {json_excerpt(found)}")
    return f"{host}:{port}"
