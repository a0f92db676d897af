"""The controller's core: it collects the nodes' state and the gateways' loads, decides, and carries out the decisions.

It knows nothing about Ray, and reaches the nodes by ``Nodes``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from medusa_runtime.errors import ClusterError, ConfigError, NoControllerError, UnknownNameError, json_excerpt
from medusa_runtime.node.regions.model_key import absolute, model_key

from ..deployment import Deployment
from ..policy.decide import Memory, Options, decide
from ..policy.replacement import CHANGED
from ..policy.sizing import LARGEST_GROUP
from ..policy.state import Consolidate, Decision, StartInstance, StopInstance
from .execution import Execution
from .groups import Groups
from .members import FORGET_LOST_S, Members
from .models import Models
from .nodes import Gateway, KnownInstance, KnownNode, Nodes
from .obstacles import Obstacles
from .plan_file import ClusterPlan, read_plan, write_plan
from .reports import loads_of
from .state import State
from .status import status
from .view import policy_state

logger = logging.getLogger(__name__)

TICK_S = 0.2
_LONG_TICK_S = 0.02
_RECOVERS_WITHIN_S = 5.0  # how long a new controller waits for the nodes to report what runs on them
_LONGEST_WAIT_S = 30.0
_LONGEST_NAME = 1000
_MOST_LISTED = 3  # instances in an event
_MOST_GATEWAYS = 1000
_GATEWAY_GONE_S = 60.0
_LONGEST_DRAIN_S = 86400.0
_LOG_S = 10.0  # for a node to answer with a log
_SAVE_AGAIN_S = 1.0  # after the plan could not be written
# Groups are for models with a TTFT SLO that one node cannot meet; live scaling is for deployments that ask for it.
OPTIONS = Options(largest_group=LARGEST_GROUP, live=True)


class Cluster:
    """The state of the cluster: what it should do, by the plan, and what it does, by the nodes' reports."""

    def __init__(self, nodes: Nodes, plan_path: Path, options: Options = OPTIONS) -> None:
        self._options = options
        self._nodes = nodes
        self._plan_path = plan_path
        self.state = State(read_plan(plan_path))
        self.models = Models(nodes)
        self.execution = Execution(self.state, nodes, self.models)
        self._groups = Groups(self.state, nodes, self.models, self.execution)
        self._members = Members(self.state, nodes, self._apply_status)
        self._memory = Memory(requested=None)
        self._began = time.monotonic()
        self._tick_took_s = 0.0
        self._save_at = math.inf  # when to write the plan after a change that no user made
        self._recovered = False
        self._replaces = False  # an instance has begun to answer: perhaps others end now
        self._obstacles = Obstacles(self.state)

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

    def _apply_status(self, node: KnownNode) -> None:
        """Update the instances and models by a node's new status."""
        self._update_instances(node)
        self._update_models(node)
        if self._replaces and self._knows_enough():
            self._tick()  # before the routes change, so that no request goes to what was replaced

    def _update_instances(self, node: KnownNode) -> None:
        """Compare the instances in a node's status with the known ones."""
        shown, before = self._own_instances(node), self._routed(node)
        for instance_id, item in shown.items():
            instance = self.state.instances.get(instance_id)
            if item["state"] == "failed":
                failure = str(item.get("failure"))
                if instance is not None and self.execution.note_failed(instance_id, failure):
                    self.state.forget_instance(instance, "instance-died", failure)
                continue
            if instance is None:
                if self.execution.was_stopped(instance_id):
                    continue
                since_s = node.seen_at - item["age_s"]
                instance = KnownInstance(instance_id, item["model"], node.name, item["state"], since_s)
                instance.digest, instance.url = item.get("deployment") or "", item.get("url") or ""
                instance.answers = item.get("answers", True)
                if item.get("group") and item["group"].get("state", "serving") == "serving":
                    instance.set_group(item["group"])
                self.state.instances[instance_id] = instance
                self._end_if_replaced(instance)
            instance.confirmed, instance.running = True, int(item.get("running", 0))
            instance.kv_use = float(item.get("kv_use", 0.0))
            self._learn_rate(node, instance, float(item.get("prefill_tokens_per_s", 0.0)))
            instance.version = item.get("version") or ""
            if item.get("pair"):
                instance.set_pair(item["pair"])
            if "gpus" in item:
                instance.slots = max(int(item["gpus"]), 1)
            instance.device = item.get("device", instance.device)
            if item.get("start"):
                self._learn_start(node, instance, item["start"])
            if instance.state != "draining" and item["state"] != instance.state:
                instance.state, instance.since_s = item["state"], node.seen_at - item["age_s"]
            if item.get("answers", True):
                self._note_answers(instance)
        node.starts = {instance_id: took for instance_id, took in node.starts.items() if instance_id in shown}
        for instance in list(self.state.instances.on(node.name)):
            if instance.id not in shown and instance.confirmed and not self.execution.busy_with(instance.id):
                ended = "ended" if instance.state == "draining" else "is gone"
                self.state.forget_instance(instance, "instance-ended", f"{instance.id} {ended}")
        # Most statuses say nothing that is new to gateways. Who else changes an instance updates the routes, too.
        place = node.url, node.status.get("state")
        if place != node.routed or self._routed(node) != before:
            node.routed = place
            self.state.publish()

    def _routed(self, node: KnownNode) -> list[tuple[object, ...]]:
        """Return what the routes depend on of a node's instances."""
        return [
            (item.id, item.state, item.rank, item.loading, item.helping, item.answers)
            for item in self.state.instances.on(node.name)
        ]

    def _note_answers(self, instance: KnownInstance) -> None:
        """Note that an instance is ready to answer. If it replaces another one, that one ends before routes change."""
        is_first, instance.answers = not instance.answers, True
        if self.state.note_answers(instance):
            self._save_at = 0.0
        if is_first and not self.state.is_outdated(instance):
            self.execution.forgive(instance.model)
            others = (item for item in self.state.instances.values() if item.model == instance.model)
            self._replaces |= any(item.digest != instance.digest for item in others)

    def _end_if_replaced(self, instance: KnownInstance) -> None:
        """End an instance whose node comes back with it when the deployment that has replaced its own has answered."""
        if self.state.is_outdated(instance) and self.state.has_answered(instance.model):
            self.execution.begin(StopInstance(instance.id, instance.node, reason=CHANGED))

    def _own_instances(self, node: KnownNode) -> dict[str, Mapping[str, Any]]:
        """Return the instances in a node's status by id, without those of other nodes, after one event for these."""
        shown = {item["id"]: item for item in node.status.get("instances", ())}
        known = self.state.instances
        foreign = {name: known[name].node for name in shown if name in known and known[name].node != node.name}
        if foreign and not node.claims:
            listed = ", ".join(f"{name} of {owner}" for name, owner in sorted(foreign.items())[:_MOST_LISTED])
            text = f"the node {node.name} reports instances of other nodes, which is ignored: {listed}"
            self.state.record_event("node-refused", text, node=node.name)
        node.claims = bool(foreign)
        return {name: item for name, item in shown.items() if name not in foreign}

    def _learn_rate(self, node: KnownNode, instance: KnownInstance, tokens_per_s: float) -> None:
        """Learn how many tokens of prompts an instance computes in a second at most."""
        deployment = self.state.deployments.get(instance.model)
        if deployment is not None and not self.state.is_outdated(instance):
            self.models.learn_rate(deployment.url, node.processor(deployment.device), tokens_per_s)

    def _learn_start(self, node: KnownNode, instance: KnownInstance, start: Mapping[str, float]) -> None:
        """Learn from a start whose first token has come."""
        if instance.helps is not None or self.state.is_outdated(instance):
            return  # its times say nothing: it helped another instance first, or is of an earlier deployment
        deployment = self.state.deployments.get(instance.model)
        if deployment is not None and self.models.learn(node, instance, deployment, start):
            predicted = f", {instance.predicted_s:.2f} s predicted" if instance.predicted_s else ""
            text = f"{instance.id}: the first token came {start['ttft_s']:.2f} s after the start{predicted}"
            self.state.record_event("cold-start", text, node=instance.node, model=instance.model)

    def _update_models(self, node: KnownNode) -> None:
        """Note new versions of models, and peers from which a node no longer reads."""
        deployed = {item.url for item in self.state.deployments.values()}
        if self.state.versions.see(node.models(), deployed):
            self._save_at = 0.0
        if self._save_at < time.monotonic():
            try:
                self._save()
            except ClusterError as error:
                logger.warning("%s; trying again", error)
                self._save_at = time.monotonic() + _SAVE_AGAIN_S
        node.excluded = {(url, source) for url, source in node.excluded if url in deployed}
        for model in node.models():
            for source, reason in model.get("excluded", {}).items():
                if (model["url"], source) not in node.excluded:
                    node.excluded.add((model["url"], source))
                    peer = next((other.name for other in self.state.nodes.values() if other.url == source), source)
                    self.state.record_event(
                        "peer-excluded", f"{node.name} reads {model['url']} from {peer} no more: {reason}", node=peer
                    )

    async def _tick_for_ever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(TICK_S):  # Python 3.11's wait_for may lose a cancellation
                    await self.state.changed.wait()
            except TimeoutError:
                pass
            self.state.changed.clear()
            try:
                self._tick()
            except Exception:
                logger.exception("a decision failed")
                await asyncio.sleep(TICK_S)

    def _tick(self) -> None:
        if not self._knows_enough():
            return
        now = time.monotonic()
        self._forget_draining(now)
        self._replaces = False
        self._groups.update()
        self.execution.look_after_helpers()
        self.models.update(self.state.deployments.values(), self.state.nodes, now)
        loads = self.state.loads.summed(self.state.gateways.values(), now, self.state.deployments)
        fetches = self.execution.fetches(now)
        view = policy_state(self.state, self.models, self.execution.live, fetches, loads)
        decisions, self._memory = decide(view, now, self._memory, self._options)
        self._obstacles.record(loads, self._memory.waiting, now)
        for decision in decisions:
            self._begin(decision)
        self._groups.begin()
        self.state.publish()
        self.state.report_drained()
        self._tick_took_s = time.monotonic() - now

    def _forget_draining(self, now: float) -> None:
        """Forget that nodes drain which have been gone for an hour, at least since this controller's start."""
        draining = self.state.draining
        if draining.keys() - self.state.nodes.keys() and now - self._began > FORGET_LOST_S:
            self.state.draining = {name: drain_s for name, drain_s in draining.items() if name in self.state.nodes}
            self._save_at = 0.0

    def _begin(self, decision: Decision) -> None:
        """Begin to carry out a decision, unless it is under way."""
        match decision:
            case StartInstance() if decision.group is not None:
                self._groups.add(decision)
            case Consolidate():
                self._groups.consolidate(decision)
            case _:
                self.execution.begin(decision)

    def _knows_enough(self) -> bool:
        """Return whether the nodes have reported what runs on them. Before that, things might be started twice."""
        if not self._recovered:
            overdue = time.monotonic() - self._began > _RECOVERS_WITHIN_S
            reported = all(node.status and node.reached for node in self.state.nodes.values())
            self._recovered = bool(self.state.nodes) and (overdue or reported)
        return self._recovered

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
                return status(self.state, self.models, self.execution)
            if operation == "routes":
                wait_s = min(max(float(arguments.get("wait_s", 0)), 0), _LONGEST_WAIT_S)
                return await self.state.routes.wait_for_change(str(arguments.get("version", "")), wait_s)
            if operation == "logs":
                return await self._logs(arguments)
            if operation in operations:
                return operations[operation](arguments)
        except (KeyError, OverflowError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{operation}: a value is missing or of the wrong type: {error}") from error
        raise ConfigError(
            f"expected one of {', '.join((*operations, 'status', 'routes', 'logs'))}, found {operation!r}"
        )

    def _deploy(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        deployment = Deployment.from_json(arguments)
        url = model_key(absolute(deployment.url))
        deployment = replace(deployment, url=url)
        self._check_names(deployment)
        before = self.state.deployments.get(deployment.name)
        self._save(deployments=self.state.deployments | {deployment.name: deployment})
        if before != deployment:
            self.state.record_event("deployed", f"{deployment.name} is deployed from {url}", model=deployment.name)
        if before is not None and before.digest != deployment.digest:
            self.execution.forgive(deployment.name)
            for instance in self.state.instances.values():
                if instance.model == deployment.name and instance.answers and self.state.note_answers(instance):
                    self._save_at = 0.0  # it is what was deployed before that
        return deployment.to_json() | {"revision": deployment.digest}

    def _check_names(self, new: Deployment) -> None:
        """Raise ConfigError if a name is used twice: each model and each adapter needs a name of its own."""
        names = [new.name, *new.adapters()]
        for other in self.state.deployments.values():
            if other.name != new.name:
                names += [other.name, *other.adapters()]
        twice = {name for name, count in Counter(names).items() if count > 1} & {new.name, *new.adapters()}
        if twice:
            raise ConfigError(f"expected a name of its own for each model and adapter, found another {min(twice)!r}")

    def _remove(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        name = self._known_name(arguments)
        self._save(deployments={key: item for key, item in self.state.deployments.items() if key != name})
        self.execution.end_all(name, "its deployment was removed")
        self.state.record_event("removed", f"{name} was removed", model=name)
        return {}

    def _scale(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        name = self._known_name(arguments)
        before = self.state.deployments[name].to_json()
        given = {key: arguments[key] for key in ("min", "max") if arguments.get(key) is not None}
        deployment = Deployment.from_json(before | given)
        self._save(deployments=self.state.deployments | {name: deployment})
        self.state.record_event("scaled", f"{name} may have {deployment.min} to {deployment.max} instances", model=name)
        return deployment.to_json()

    def _drain(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        name = self._known_node(arguments).name
        before = self.state.draining
        if arguments.get("undo"):
            self._save(draining={key: drain_s for key, drain_s in before.items() if key != name})
        else:
            self._save(draining=before | {name: _drain_s(arguments)})
            if name not in before:
                self.state.nodes[name].drained_reported = False
                self.state.record_event("draining", f"the node {name} drains", node=name)
        return {"node": name, "state": self.state.node_state(self.state.nodes[name])}

    async def _logs(self, arguments: Mapping[str, Any]) -> Any:
        """Return the logs of a node, or the text of one of them."""
        node, log, after = self._known_node(arguments), arguments.get("log"), arguments.get("after")
        if node.lost_at is not None:
            raise ClusterError(f"the node {node.name} has not answered for {time.monotonic() - node.seen_at:.0f} s")
        return await self._nodes.logs(
            node.name, node.url, None if log is None else str(log), None if after is None else int(after), _LOG_S
        )

    def _known_node(self, arguments: Mapping[str, Any]) -> KnownNode:
        name = str(arguments["node"])
        if name not in self.state.nodes:
            raise UnknownNameError(
                f"no node is called {name!r}; expected one of {', '.join(sorted(self.state.nodes)) or 'none'}"
            )
        return self.state.nodes[name]

    def _report(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        name, url, now = str(arguments["gateway"]), arguments.get("url"), time.monotonic()
        loads = {model: load for model, load in loads_of(arguments["loads"]).items() if model in self.state.deployments}
        if not isinstance(url, str | None) or len(name) > _LONGEST_NAME:
            raise ConfigError(
                f"report: expected a gateway's name and URL, found {json_excerpt(name)} and {json_excerpt(url)}"
            )
        if name not in self.state.gateways:
            self._forget_gateways(now)
            self.state.record_event("gateway", f"the gateway {name} has come")
        self.state.gateways[name] = Gateway(name, url, now, loads)
        serving = {item.model for item in self.state.instances.values() if item.state != "draining"}
        if any(load.get("waiting") and model not in serving for model, load in loads.items()):
            # A request waits for an instance, so decide now, unless ticks are slow, as in a very large cluster.
            self.state.wake() if self._tick_took_s > _LONG_TICK_S else self._tick()
        version = self.state.routes.version
        return {"version": version} if arguments.get("version") == version else self.state.routes.current

    def _forget_gateways(self, now: float) -> None:
        """Make room for another gateway by forgetting those that are gone. Raises ConfigError if there is none."""
        if len(self.state.gateways) >= _MOST_GATEWAYS:
            self.state.gateways = {
                name: item for name, item in self.state.gateways.items() if now - item.seen_at < _GATEWAY_GONE_S
            }
        if len(self.state.gateways) >= _MOST_GATEWAYS:
            raise ConfigError(f"report: expected at most {_MOST_GATEWAYS} gateways, found another")

    def _sources(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the URLs of the node servers from which a node should read a model, best first."""
        url, asking = model_key(absolute(str(arguments["url"]))), str(arguments.get("node"))
        holders = tuple(
            node.name
            for node in self.state.nodes.values()
            if node.lost_at is None
            and node.name != asking
            and any(model["url"] == url and model["state"] == "done" for model in node.models())
        )
        names = self.execution.sources(asking, url, holders)
        found = [self.state.nodes[name] for name in names if name in self.state.nodes]
        return [node.url for node in found if node.lost_at is None]

    def _known_name(self, arguments: Mapping[str, Any]) -> str:
        name = str(arguments["name"])
        if name not in self.state.deployments:
            names = ", ".join(sorted(self.state.deployments)) or "none"
            raise UnknownNameError(f"no model is deployed as {name!r}; expected one of {names}")
        return name

    def _save(
        self, *, deployments: dict[str, Deployment] | None = None, draining: dict[str, float | None] | None = None
    ) -> None:
        """Write a new plan, and use it. Raises ClusterError if it cannot be written, and changes nothing then."""
        deployments = self.state.deployments if deployments is None else deployments
        draining = self.state.draining if draining is None else draining
        answered = {name: digest for name, digest in self.state.answered.items() if name in deployments}
        try:
            write_plan(self._plan_path, ClusterPlan(deployments, draining, self.state.versions.to_json(), answered))
        except OSError as error:
            raise ClusterError(f"{self._plan_path} could not be written: {error.strerror}") from error
        self.state.deployments, self.state.draining, self._save_at = deployments, draining, math.inf
        self.state.answered = answered
        self.state.loads.keep(deployments)
        for gateway in self.state.gateways.values():  # a later model of the same name has a load of its own
            gateway.loads = {model: load for model, load in gateway.loads.items() if model in deployments}
        self.state.publish()
        self.state.wake()


def _drain_s(arguments: Mapping[str, Any]) -> float | None:
    """Return for how many seconds requests may run on a draining node, or None for the default. Raises ConfigError."""
    if arguments.get("drain_s") is None:
        return None
    drain_s = float(arguments["drain_s"])
    if not 0 <= drain_s <= _LONGEST_DRAIN_S:
        raise ConfigError(f"drain_s: expected seconds from 0 to {_LONGEST_DRAIN_S:g}, found {drain_s:g}")
    return drain_s
