"""The routes of a cluster: which models are deployed, and where their instances answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from medusa_runtime.config import Settings, seconds
from medusa_runtime.errors import ClusterError

from ..deployment import adapters_of

READY, STARTING = "ready", "starting"

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance of a model. ``url`` is its address at its node server, to which the path is appended."""

    id: str
    node: str
    url: str
    state: str
    revision: str = ""  # of its deployment


@dataclass(frozen=True, slots=True)
class DeployedModel:
    """A deployed model: its name, its deployment as JSON, its instances, and the URLs of its adapters by name.

    Instances of another ``revision`` are those of the deployment before, which do not have adapters that are new.
    """

    name: str
    deployment: Mapping[str, Any] = field(default_factory=dict)
    instances: tuple[Instance, ...] = ()
    adapters: Mapping[str, str] = field(default_factory=dict)
    revision: str = ""

    @property
    def is_replacing(self) -> bool:
        """True while instances of another revision serve."""
        return any(one.state == READY and one.revision != self.revision for one in self.instances)

    @property
    def concurrency(self) -> int:
        """The number of sequences that one instance works on at the same time."""
        value = self._setting("max_concurrency", int)
        return Settings().max_concurrency if value is None else max(1, value)

    def room_for(self, cost: float) -> float:
        """Return how many of an instance's sequences must be free before it gets a request of this cost.

        A quarter is enough, since the others wait in the instance's own queue, if that is long enough. A request for as
        many sequences as an instance has, which it may well refuse, must not hold up all behind it until it is idle.
        """
        queue = self._setting("max_waiting", int)
        queue = Settings().max_waiting if queue is None else max(0, queue)
        return min(cost, max(self.concurrency // 4, self.concurrency - queue, 1))

    @property
    def hold_s(self) -> float | None:
        """The seconds that a request may wait for an instance, or None if the deployment does not set them."""
        return self._setting("hold_s", seconds)

    def _setting(self, name: str, parse: Callable[[str], _Value]) -> _Value | None:
        settings = self.deployment.get("settings")
        value = settings.get(name) if isinstance(settings, Mapping) else None
        try:
            return None if value is None else parse(str(value))
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class Routes:
    """All deployed models by name. ``version`` is text to be compared for equality only."""

    version: str = ""
    models: Mapping[str, DeployedModel] = field(default_factory=dict)

    def instances(self) -> dict[str, Instance]:
        """Return all instances of all models, by id."""
        return {found.id: found for model in self.models.values() for found in model.instances}


def parse(value: object) -> Routes:
    """Read routes from a controller's answer. Raises ClusterError for anything else."""
    try:
        routes = dict(cast("Mapping[str, Any]", value))
        models = {str(name): _deployed(str(name), entry) for name, entry in routes["models"].items()}
        return Routes(str(routes.get("version", "")), models)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ClusterError(f"expected routes from the controller, found something else: {error!r}") from None


def _deployed(name: str, entry: Mapping[str, Any]) -> DeployedModel:
    instances = tuple(
        Instance(
            str(found["id"]),
            str(found.get("node", "")),
            str(found["url"]).rstrip("/"),
            str(found["state"]),
            str(found.get("revision", "")),
        )
        for found in entry["instances"]
    )
    deployment = dict(entry.get("deployment") or {})
    settings = deployment.get("settings")
    adapters = adapters_of(str(deployment.get("engine", "torch")), settings if isinstance(settings, Mapping) else {})
    return DeployedModel(name, deployment, instances, adapters, str(entry.get("revision", "")))


def node_server(instance_url: str) -> str | None:
    """Return the node server's URL in an instance's URL, or None if it has none."""
    base, separator, _ = instance_url.partition("/instances/")
    return base if separator else None
