"""The controller's state: what the cluster should do, by the plan, and what it does, by its nodes' reports.

All parts of the controller share it. It decides nothing and orders nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

from ..deployment import Deployment
from .instances import Instances
from .nodes import Gateway, KnownInstance, KnownNode
from .plan_file import ClusterPlan
from .reports import Loads
from .versions import Versions

logger = logging.getLogger(__name__)

_KEPT_EVENTS = 500


class RoutePublisher:
    """The current routes. A version is text to be compared for equality only, and is new after a restart."""

    def __init__(self) -> None:
        self._start = secrets.token_hex(4)
        self._count = 0
        self._models: dict[str, Any] = {}
        self._changed = asyncio.Event()

    @property
    def version(self) -> str:
        return f"{self._start}-{self._count}"

    @property
    def current(self) -> dict[str, Any]:
        return {"version": self.version, "models": self._models}

    def publish(self, models: dict[str, Any]) -> None:
        """Use these routes, and wake the waiting calls if the routes have changed."""
        if models == self._models:
            return
        self._models = models
        self._count += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self, version: str, wait_s: float) -> dict[str, Any]:
        """Return the routes as soon as their version is another than ``version``, or after ``wait_s``."""
        if version == self.version:
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return self.current


class State:
    """Deployments by name, nodes by name, instances by id, gateways by name, and the routes that follow from them.

    ``draining`` are the nodes that a user has told to drain, with the seconds that requests may still run there, or
    None for the default. ``changed`` is set when the next decision should come at once.
    """

    def __init__(self, plan: ClusterPlan) -> None:
        self.deployments: dict[str, Deployment] = dict(plan.deployments)
        self.draining: dict[str, float | None] = dict(plan.draining)
        self.versions = Versions(plan.versions)
        self.answered: dict[str, str] = dict(plan.answered)  # name → digest of the deployment that has answered last
        self.nodes: dict[str, KnownNode] = {}
        self.instances = Instances()
        self.gateways: dict[str, Gateway] = {}
        self.loads = Loads()
        self._routes = RoutePublisher()
        self._stale = False  # the routes are to be updated
        self.events: deque[dict[str, Any]] = deque(maxlen=_KEPT_EVENTS)
        self.changed = asyncio.Event()
        self._described: tuple[dict[str, Deployment], dict[str, Any]] = {}, {}  # deployments, and their form in JSON
        self._digests: dict[str, str] = {}

    def wake(self) -> None:
        """Make the next decision come at once."""
        self.changed.set()

    def record_event(self, kind: str, text: str, *, node: str | None = None, model: str | None = None) -> None:
        """Log an event, and keep it for the status."""
        logger.info("%s", text)
        self.events.append({"at": time.monotonic(), "kind": kind, "model": model, "node": node, "text": text})

    @property
    def routes(self) -> RoutePublisher:
        self._update_routes()
        return self._routes

    def publish(self) -> None:
        """Have the routes updated once for all changes of this turn of the event loop: a decision may make hundreds."""
        if not self._stale:
            self._stale = True
            asyncio.get_running_loop().call_soon(self._update_routes)

    def _update_routes(self) -> None:
        if not self._stale:
            return
        self._stale = False
        leaving, stand_ins = self.leaving(), self.stand_ins()
        self._describe()
        models: dict[str, Any] = {
            name: {"deployment": found, "revision": self._digests[name], "instances": []}
            for name, found in self._described[1].items()
        }
        for item in self.instances.values():
            node = self.nodes.get(item.node)
            serves = item.rank == 0 and not item.loading and not item.helping
            if serves and item.model in models and node is not None and node.url:
                ends = item.node in leaving or (self.is_outdated(item) and not self.may_serve_on(item))
                state = "draining" if ends else "starting" if item.id in stand_ins else item.state
                shown = {"id": item.id, "node": item.node, "url": f"{node.url}/instances/{item.id}", "state": state}
                models[item.model]["instances"].append(shown | {"revision": item.digest})
        self._routes.publish(models)

    def _describe(self) -> None:
        if self._described[0] is not self.deployments:  # they are replaced together
            self._described = self.deployments, {name: item.to_json() for name, item in self.deployments.items()}
            self._digests = {name: item.digest for name, item in self.deployments.items()}

    def is_outdated(self, instance: KnownInstance) -> bool:
        """Return whether an instance was started with what was deployed under its name before."""
        self._describe()
        return bool(instance.digest) and self._digests.get(instance.model, instance.digest) != instance.digest

    def may_serve_on(self, instance: KnownInstance) -> bool:
        """Return whether an outdated instance may serve until one of the current deployment stands in for it.

        Not where no order reaches it once the current deployment has answered: requests would go back and forth.
        """
        node = self.nodes.get(instance.node)
        ordered = node is not None and node.reached and not node.silent
        return instance.answers and (ordered or not self.has_answered(instance.model))

    def has_answered(self, model: str) -> bool:
        """Return whether an instance of the current deployment of a model has ever been ready to answer."""
        self._describe()
        return model in self.answered and self.answered[model] == self._digests.get(model)

    def note_answers(self, instance: KnownInstance) -> bool:
        """Note that an instance answers. Return whether it is the first one of its model's current deployment."""
        if not instance.digest or self.is_outdated(instance) or self.has_answered(instance.model):
            return False
        self.answered[instance.model] = instance.digest
        return True

    def stand_ins(self) -> set[str]:
        """Return the instances, by id, that do not answer yet while those that they are to replace still do."""
        listening: defaultdict[str, list[KnownInstance]] = defaultdict(list)  # by model
        for item in self.instances.values():
            if item.state == "ready" and item.model in self.deployments:
                listening[item.model].append(item)
        found: set[str] = set()
        for model, ones in listening.items():
            if all(item.answers for item in ones):
                continue
            version = self.newest_version(self.deployments[model].url)
            old = {item.id for item in ones if self.is_outdated(item) or (item.version or version) != version}
            if any(item.id in old and item.answers and not item.helping for item in ones):
                found |= {item.id for item in ones if not item.answers and item.id not in old}
        return found

    def is_wanted(self, instance: KnownInstance) -> bool:
        """Return whether the instance should still start, that is, nothing has ended it since its start was decided."""
        return self.instances.get(instance.id) is instance and instance.state != "draining"

    def forget_instance(self, instance: KnownInstance, kind: str, text: str) -> None:
        """Forget an instance that has ended by itself, with an event."""
        self.instances.pop(instance.id, None)
        self.record_event(kind, text, node=instance.node, model=instance.model)
        self.publish()
        self.wake()

    def lose_node(self, node: KnownNode) -> None:
        """Forget the instances of a lost node."""
        gone = list(self.instances.on(node.name))
        for item in gone:
            del self.instances[item.id]
        if node.spare:
            node.spare = False
            self.record_event("node-lost", f"the node {node.name}, which was not needed, has ended", node=node.name)
        else:
            self.record_event("node-lost", f"the node {node.name} is lost, with {len(gone)} instances", node=node.name)
        self.publish()
        self.wake()

    def set_spare(self, name: str, *, spare: bool) -> None:
        """Give a node back to the autoscaler, or with ``spare=False`` take it back."""
        node = self.nodes[name]
        if node.spare == spare:
            return
        node.spare = spare
        if spare:
            self.record_event(
                "node-spare", f"the node {name} has had nothing to do: the autoscaler may end it", node=name
            )
        else:
            node.reached = False  # it has no actor
            self.record_event("node-used", f"the node {name} is needed again", node=name)
        self.publish()

    def copies(self) -> dict[str, dict[str, Mapping[str, Any]]]:
        """Return the copies of each model, at least in part, in the status of live nodes, by URL and node."""
        found: defaultdict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
        for node in self.nodes.values():
            if node.lost_at is None:
                for url, model in node.shown().items():
                    found[url][node.name] = model
        return found

    def newest_version(self, url: str) -> str:
        """Return the newest version of a model that a live node has, or an empty string."""
        shown = [node.shown().get(url) for node in self.nodes.values() if node.lost_at is None]
        return self.versions.current(url, [model for model in shown if model is not None])

    def leaving(self) -> set[str]:
        """Return the nodes that get nothing new, because they drain, were given back, or are ending by themselves."""
        ending = {name for name, node in self.nodes.items() if node.status.get("state") == "draining" or node.spare}
        return self.draining.keys() | ending

    def is_drained(self, name: str) -> bool:
        """Return whether a draining node runs no instance and holds no deployed model's last complete copy."""
        if self.instances.on(name):
            return False
        leaving = self.leaving()
        others = [node for node in self.nodes.values() if node.name not in leaving and node.lost_at is None]
        elsewhere = {model["url"] for node in others for model in node.models() if model["state"] == "done"}
        here = {model["url"] for model in self.nodes[name].models() if model["state"] == "done"}
        return not others or not any(item.url in here - elsewhere for item in self.deployments.values())

    def report_drained(self) -> None:
        """Record each node that has become drained, once."""
        for name in self.draining.keys() & self.nodes.keys():
            node = self.nodes[name]
            if not node.drained_reported and self.is_drained(name):
                node.drained_reported = True
                self.record_event("node-drained", f"the node {name} has nothing left that others need", node=name)

    def node_state(self, node: KnownNode) -> str:
        """Return the state of a node as a user sees it: joining, alive, silent, draining, drained or lost."""
        if node.lost_at is not None:
            return "lost"
        if not node.joined:
            return "joining"
        if node.silent or not node.reached:
            return "silent"
        if node.name in self.draining or node.spare:
            return "drained" if self.is_drained(node.name) else "draining"
        return "draining" if node.status.get("state") == "draining" else "alive"
