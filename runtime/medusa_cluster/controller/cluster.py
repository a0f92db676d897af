"""The controller's core: it collects the nodes' state and the gateways' loads, decides, and carries out the decisions.

It knows nothing about Ray, and reaches the nodes by ``Nodes``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from medusa_runtime.errors import ClusterError, ConfigError, NoControllerError, UnknownNameError, json_excerpt
from medusa_runtime.node.regions.model_key import absolute, model_key

from ..deployment import Deployment
from ..policy.decide import Memory, Options, decide
from ..policy.sizing import LARGEST_GROUP
from .execution import Execution
from .groups import Groups
from .live import Live
from .members import Members
from .models import Models
from .nodes import Gateway, KnownInstance, KnownNode, Nodes
from .plan_file import ClusterPlan, read_plan, write_plan
from .reports import loads_of
from .route_publisher import RoutePublisher
from .status import status
from .versions import Versions
from .view import Loads, policy_state

logger = logging.getLogger(__name__)

TICK_S = 0.2
_LONG_TICK_S = 0.02
_RECOVERS_WITHIN_S = 5.0  # how long a new controller waits for the nodes to report what runs on them
_KEPT_EVENTS = 500
_LONGEST_WAIT_S = 30.0
_LONGEST_NAME = 1000
_MOST_GATEWAYS = 1000
_GATEWAY_GONE_S = 60.0
_LONGEST_DRAIN_S = 86400.0
_SAVE_AGAIN_S = 1.0  # after the plan could not be written
# Groups are for models with a TTFT SLO that one node cannot meet; live scaling is for deployments that ask for it.
OPTIONS = Options(largest_group=LARGEST_GROUP, live=True)


class Cluster:
    """The state of the cluster: what it should do, by the plan, and what it does, by the nodes' reports."""

    def __init__(self, nodes: Nodes, plan_path: Path, options: Options = OPTIONS) -> None:
        self._options = options
        self._plan_path = plan_path
        plan = read_plan(plan_path)
        self.deployments: dict[str, Deployment] = dict(plan.deployments)
        self.draining: dict[str, float | None] = dict(plan.draining)
        self.versions = Versions(plan.versions)
        self.nodes: dict[str, KnownNode] = {}
        self.instances: dict[str, KnownInstance] = {}
        self.gateways: dict[str, Gateway] = {}
        self.events: deque[dict[str, Any]] = deque(maxlen=_KEPT_EVENTS)
        self.wanted: dict[str, int] = {}
        self.loads = Loads()
        self.routes = RoutePublisher()
        self.execution = Execution(self, nodes)
        self._members = Members(self, nodes)
        self.groups = Groups(self, nodes)
        self.live = Live(self, nodes)
        self.models = Models(nodes)
        self._memory = Memory(requested_nodes=None)
        self._wake = asyncio.Event()
        self._began = time.monotonic()
        self._tick_took_s = 0.0
        self._save_at = math.inf  # when to write the plan after a change that no user made
        self._recovered = False

    # Background work.

    async def run(self) -> None:
        """Follow the nodes and decide, until cancelled."""
        tasks = [asyncio.create_task(self._members.run()), asyncio.create_task(self._tick_for_ever())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.execution.close()

    def wake(self) -> None:
        """Make the next tick come at once."""
        self._wake.set()

    def apply_status(self, node: KnownNode) -> None:
        """Update the instances and models by a node's new status."""
        self._update_instances(node)
        self._update_models(node)

    def lose_node(self, node: KnownNode) -> None:
        """Forget the instances of a lost node."""
        gone = [item for item in self.instances.values() if item.node == node.name]
        for item in gone:
            del self.instances[item.id]
        if node.spare:
            node.spare = False
            self.record_event("node-lost", f"the node {node.name}, which was not needed, has ended", node=node.name)
        else:
            self.record_event("node-lost", f"the node {node.name} is lost, with {len(gone)} instances", node=node.name)
        self.publish()
        self.wake()

    def _update_instances(self, node: KnownNode) -> None:
        """Compare the instances in a node's status with the known ones."""
        shown = {item["id"]: item for item in node.status.get("instances", ())}
        clock_s = time.time() - node.status.get("at", time.time())  # how far the node's clock is behind this one
        for instance_id, item in shown.items():
            instance = self.instances.get(instance_id)
            if item["state"] == "failed":
                if instance is not None and self.execution.note_failed(instance_id):
                    self._forget_instance(instance, "instance-died", str(item.get("failure")))
                continue
            if instance is None:
                if self.execution.was_stopped(instance_id):
                    continue
                instance = KnownInstance(instance_id, item["model"], node.name, item["state"], item["since"] + clock_s)
                if item.get("group") and item["group"].get("state", "serving") == "serving":
                    instance.set_group(item["group"])
                self.instances[instance_id] = instance
            instance.confirmed, instance.running = True, int(item.get("running", 0))
            instance.version = str(item.get("version", ""))
            if "helping" in item:
                instance.loading = item["helping"]
            if item.get("start"):
                self._learn_start(node, instance, item["start"])
            if instance.state != "draining" and item["state"] != instance.state:
                instance.state, instance.since = item["state"], item["since"] + clock_s
        node.starts = {instance_id: took for instance_id, took in node.starts.items() if instance_id in shown}
        for instance in [item for item in self.instances.values() if item.node == node.name]:
            if instance.id not in shown and instance.confirmed and not self.execution.busy_with(instance.id):
                ended = "ended" if instance.state == "draining" else "is gone"
                self._forget_instance(instance, "instance-ended", f"{instance.id} {ended}")
        self.publish()

    def _learn_start(self, node: KnownNode, instance: KnownInstance, start: Mapping[str, float]) -> None:
        """Learn from a start whose first token has come."""
        if instance.helps is not None:
            return  # it helped another instance first, so its times say nothing
        deployment = self.deployments.get(instance.model)
        if deployment is not None and self.models.learn(node, instance, deployment.url, start):
            predicted = f", {instance.predicted_s:.2f} s predicted" if instance.predicted_s else ""
            text = f"{instance.id}: the first token came {start['ttft_s']:.2f} s after the start{predicted}"
            self.record_event("cold-start", text, node=instance.node, model=instance.model)

    def _update_models(self, node: KnownNode) -> None:
        """Note new versions of models, and peers from which a node no longer reads."""
        deployed = {item.url for item in self.deployments.values()}
        if self.versions.see(node.models(), deployed):
            self._save_at = 0.0
        if self._save_at < time.monotonic():
            try:
                self._save()
            except ClusterError as error:
                logger.warning("%s; trying again", error)
                self._save_at = time.monotonic() + _SAVE_AGAIN_S
        node.excluded = {(url, source) for url, source in node.excluded if url in deployed}
        names = {other.url: other.name for other in self.nodes.values()}
        for model in node.models():
            for source, reason in model.get("excluded", {}).items():
                if (model["url"], source) not in node.excluded:
                    node.excluded.add((model["url"], source))
                    peer = names.get(source, source)
                    self.record_event(
                        "peer-excluded", f"{node.name} reads {model['url']} from {peer} no more: {reason}", node=peer
                    )

    def _forget_instance(self, instance: KnownInstance, kind: str, text: str) -> None:
        self.instances.pop(instance.id, None)
        self.record_event(kind, text, node=instance.node, model=instance.model)
        self.publish()
        self.wake()

    async def _tick_for_ever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(TICK_S):  # Python 3.11's wait_for may lose a cancellation
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                self._tick()
            except Exception:
                logger.exception("a decision failed")
                await asyncio.sleep(TICK_S)

    def _tick(self) -> None:
        if not self._knows_enough():
            return
        now = time.monotonic()
        self.groups.update()
        self.models.update(self.deployments.values(), self.nodes, now)
        loads = self.loads.summed(self.gateways.values(), now, self.deployments)
        fetches = self.execution.fetches(self.nodes, now)
        state = policy_state(self, fetches, loads)
        decisions, self._memory = decide(state, now, self._memory, self._options)
        for decision in decisions:
            self.execution.begin(decision)
        self.groups.begin()
        self.publish()
        self._report_drained()
        self._tick_took_s = time.monotonic() - now

    def _knows_enough(self) -> bool:
        """Return whether the nodes have reported what runs on them. Before that, things might be started twice."""
        if not self._recovered:
            overdue = time.monotonic() - self._began > _RECOVERS_WITHIN_S
            reported = all(node.status and node.reached for node in self.nodes.values())
            self._recovered = bool(self.nodes) and (overdue or reported)
        return self._recovered

    def leaving(self) -> set[str]:
        """Return the nodes that get nothing new, because they drain, were given back, or are ending by themselves."""
        ending = {name for name, node in self.nodes.items() if node.status.get("state") == "draining" or node.spare}
        return self.draining.keys() | ending

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

    def _report_drained(self) -> None:
        for name in self.draining.keys() & self.nodes.keys():
            node = self.nodes[name]
            if not node.drained_reported and self.is_drained(name):
                node.drained_reported = True
                self.record_event("node-drained", f"the node {name} has nothing left that others need", node=name)

    def is_drained(self, name: str) -> bool:
        """Return whether a draining node runs no instance and holds no deployed model's last complete copy."""
        if any(item.node == name for item in self.instances.values()):
            return False
        others = [node for node in self.nodes.values() if node.name not in self.leaving() and node.lost_at is None]
        elsewhere = {model["url"] for node in others for model in node.models() if model["state"] == "done"}
        here = {model["url"] for model in self.nodes[name].models() if model["state"] == "done"}
        return not others or not any(item.url in here - elsewhere for item in self.deployments.values())

    def publish(self) -> None:
        """Update the routes."""
        leaving = self.leaving()
        models: dict[str, Any] = {}
        for name, deployment in self.deployments.items():
            models[name] = {"deployment": deployment.to_json(), "instances": []}
        for item in self.instances.values():
            node = self.nodes.get(item.node)
            if item.rank == 0 and not item.loading and item.model in models and node is not None and node.url:
                state = "draining" if item.node in leaving else item.state
                url = f"{node.url}/instances/{item.id}"
                models[item.model]["instances"].append({"id": item.id, "node": item.node, "url": url, "state": state})
        self.routes.publish(models)

    def record_event(self, kind: str, text: str, *, node: str | None = None, model: str | None = None) -> None:
        """Log an event, and keep it for the status."""
        logger.info("%s", text)
        self.events.append({"at": time.time(), "kind": kind, "model": model, "node": node, "text": text})

    # Operations.

    async def answer(self, request: dict[str, Any]) -> Any:
        """Answer an operation under `/cluster/`. Raises MedusaError."""
        operation, arguments = str(request.get("op")), request.get("arguments") or {}
        operations = {
            "deploy": self._deploy,
            "remove": self._remove,
            "scale": self._scale,
            "drain": self._drain,
            "report": self._report,
            "sources": self._sources,
        }
        if not isinstance(arguments, dict):
            raise ConfigError("expected a JSON object of arguments")
        if operation in ("report", "routes") and not self._knows_enough():
            # With incomplete routes, gateways would forget running instances.
            raise NoControllerError("the controller has just started, and does not know yet what runs")
        try:
            if operation == "ping":
                return os.getpid()
            if operation == "status":
                return status(self)
            if operation == "routes":
                wait_s = min(max(float(arguments.get("wait_s", 0)), 0), _LONGEST_WAIT_S)
                return await self.routes.wait_for_change(str(arguments.get("version", "")), wait_s)
            if operation in operations:
                return operations[operation](arguments)
        except (KeyError, OverflowError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{operation}: a value is missing or of the wrong type: {error}") from error
        raise ConfigError(f"expected one of {', '.join((*operations, 'status', 'routes'))}, found {operation!r}")

    def _deploy(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        deployment = Deployment.from_json(arguments)
        url = model_key(absolute(deployment.url))
        deployment = replace(deployment, url=url)
        self._check_names(deployment)
        before = self.deployments.get(deployment.name)
        self._save(deployments=self.deployments | {deployment.name: deployment})
        if before != deployment:
            self.record_event("deployed", f"{deployment.name} is deployed from {url}", model=deployment.name)
        if before is not None and (before.url, before.engine, before.settings) != (
            deployment.url,
            deployment.engine,
            deployment.settings,
        ):
            self.execution.end_all(deployment.name, "its deployment has changed")
        return deployment.to_json()

    def _check_names(self, new: Deployment) -> None:
        """Raise ConfigError if a name is used twice: each model and each adapter needs a name of its own."""
        names = [new.name, *new.adapters()]
        for other in self.deployments.values():
            if other.name != new.name:
                names += [other.name, *other.adapters()]
        twice = {name for name, count in Counter(names).items() if count > 1} & {new.name, *new.adapters()}
        if twice:
            raise ConfigError(f"expected a name of its own for each model and adapter, found another {min(twice)!r}")

    def _remove(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        name = self._known_name(arguments)
        self._save(deployments={key: item for key, item in self.deployments.items() if key != name})
        self.execution.end_all(name, "its deployment was removed")
        self.record_event("removed", f"{name} was removed", model=name)
        return {}

    def _scale(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        name = self._known_name(arguments)
        before = self.deployments[name].to_json()
        given = {key: arguments[key] for key in ("min", "max") if arguments.get(key) is not None}
        deployment = Deployment.from_json(before | given)
        self._save(deployments=self.deployments | {name: deployment})
        self.record_event("scaled", f"{name} may have {deployment.min} to {deployment.max} instances", model=name)
        return deployment.to_json()

    def _drain(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        name = str(arguments["node"])
        if name not in self.nodes:
            raise UnknownNameError(
                f"no node is called {name!r}; expected one of {', '.join(sorted(self.nodes)) or 'none'}"
            )
        before = self.draining
        if arguments.get("undo"):
            self._save(draining={key: drain_s for key, drain_s in before.items() if key != name})
        else:
            self._save(draining=before | {name: _drain_s(arguments)})
            if name not in before:
                self.nodes[name].drained_reported = False
                self.record_event("draining", f"the node {name} drains", node=name)
        return {"node": name, "state": self.node_state(self.nodes[name])}

    def node_state(self, node: KnownNode) -> str:
        if node.lost_at is not None:
            return "lost"
        if not node.joined:
            return "joining"
        if node.silent or not node.reached:
            return "silent"
        if node.name in self.draining or node.spare:
            return "drained" if self.is_drained(node.name) else "draining"
        return "draining" if node.name in self.leaving() else "alive"

    def _report(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        name, url, now = str(arguments["gateway"]), arguments.get("url"), time.monotonic()
        loads = {model: load for model, load in loads_of(arguments["loads"]).items() if model in self.deployments}
        if not isinstance(url, str | None) or len(name) > _LONGEST_NAME:
            raise ConfigError(
                f"report: expected a gateway's name and URL, found {json_excerpt(name)} and {json_excerpt(url)}"
            )
        if name not in self.gateways:
            self._forget_gateways(now)
            self.record_event("gateway", f"the gateway {name} has come")
        self.gateways[name] = Gateway(name, url, time.time(), now, loads)
        serving = {item.model for item in self.instances.values() if item.state != "draining"}
        if any(load.get("waiting") and model not in serving for model, load in loads.items()):
            # A request waits for an instance, so decide now, unless ticks are slow, as in a very large cluster.
            self.wake() if self._tick_took_s > _LONG_TICK_S else self._tick()
        version = self.routes.version
        return {"version": version} if arguments.get("version") == version else self.routes.current

    def _forget_gateways(self, now: float) -> None:
        """Make room for another gateway by forgetting those that are gone. Raises ConfigError if there is none."""
        if len(self.gateways) >= _MOST_GATEWAYS:
            self.gateways = {name: item for name, item in self.gateways.items() if now - item.seen_at < _GATEWAY_GONE_S}
        if len(self.gateways) >= _MOST_GATEWAYS:
            raise ConfigError(f"report: expected at most {_MOST_GATEWAYS} gateways, found another")

    def _sources(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the URLs of the node servers from which a node should read a model, best first."""
        url, asking = model_key(absolute(str(arguments["url"]))), str(arguments.get("node"))
        holders = tuple(
            node.name
            for node in self.nodes.values()
            if node.lost_at is None
            and node.name != asking
            and any(model["url"] == url and model["state"] == "done" for model in node.models())
        )
        names = self.execution.sources(asking, url, holders)
        found = [self.nodes[name] for name in names if name in self.nodes]
        return [node.url for node in found if node.lost_at is None]

    def _known_name(self, arguments: Mapping[str, Any]) -> str:
        name = str(arguments["name"])
        if name not in self.deployments:
            names = ", ".join(sorted(self.deployments)) or "none"
            raise UnknownNameError(f"no model is deployed as {name!r}; expected one of {names}")
        return name

    def _save(
        self, *, deployments: dict[str, Deployment] | None = None, draining: dict[str, float | None] | None = None
    ) -> None:
        """Write a new plan, and use it. Raises ClusterError if it cannot be written, and changes nothing then."""
        deployments = self.deployments if deployments is None else deployments
        draining = self.draining if draining is None else draining
        try:
            write_plan(self._plan_path, ClusterPlan(deployments, draining, self.versions.to_json()))
        except OSError as error:
            raise ClusterError(f"{self._plan_path} could not be written: {error.strerror}") from error
        self.deployments, self.draining, self._save_at = deployments, draining, math.inf
        self.loads.keep(deployments)
        self.publish()
        self.wake()


def _drain_s(arguments: Mapping[str, Any]) -> float | None:
    """Return for how many seconds requests may run on a draining node, or None for the default. Raises ConfigError."""
    if arguments.get("drain_s") is None:
        return None
    drain_s = float(arguments["drain_s"])
    if not 0 <= drain_s <= _LONGEST_DRAIN_S:
        raise ConfigError(f"drain_s: expected seconds from 0 to {_LONGEST_DRAIN_S:g}, found {drain_s:g}")
    return drain_s
