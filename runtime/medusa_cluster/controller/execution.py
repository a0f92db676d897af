"""The execution of decisions: each is ordered once from its node, and remembered until the node confirms it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from medusa_runtime.errors import MedusaError
from medusa_runtime.storage.retry import doubling_pause_s

from ..policy.state import (
    ChangeRole,
    Decision,
    Drop,
    Fetch,
    Pace,
    Pin,
    RequestNodes,
    ResumeInstance,
    SetSpare,
    StartInstance,
    StopInstance,
)
from .live import Live
from .models import Models
from .nodes import KnownFetch, KnownInstance, KnownNode, Nodes
from .state import State

logger = logging.getLogger(__name__)

_CALL_S = 10.0
_START_S = 90.0
_ORDERED_S = 0.5  # after this, a node's status shows what became of an ordered fetch
_FETCH_SHOWN_S = 10.0  # after this, a fetch that its node does not show is forgotten
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_STOPPED_KEPT_S = 120.0
_MOST_SOURCES = 5  # for a node without a plan


class Execution:
    """The decisions under way, each in a task of its own. None of them is begun twice."""

    def __init__(self, state: State, nodes: Nodes, models: Models) -> None:
        self._state = state
        self._nodes = nodes
        self._models = models
        self.live = Live(state, nodes, models)
        self._running: dict[tuple[str, ...], asyncio.Task[None]] = {}
        self._fetches: dict[tuple[str, str], KnownFetch] = {}
        self._failures: dict[str, tuple[int, float]] = {}  # model → failed starts in a row, and when to try again
        self._reasons: dict[str, str] = {}  # model → why the last start failed, until an instance answers
        self._failed_fetches: dict[tuple[str, str], tuple[int, float]] = {}
        self._failed_ids: dict[str, float] = {}
        self._stopped: dict[str, float] = {}
        self._wanted_nodes = RequestNodes(0)

    def begin(self, decision: Decision) -> None:
        """Begin to carry out a decision, unless it is under way."""
        match decision:
            case StartInstance():
                self._begin_start(decision)
            case StopInstance():
                self._begin_stop(decision)
            case ResumeInstance():
                self._begin_resume(decision)
            case Fetch():
                self._begin_fetch(decision)
            case Drop(node, url):
                self._fetches.pop((node, url), None)
                self.start_task(("drop", node, url), self._call(node, {"op": "drop", "url": url}))
            case Pin(node, url, pinned):
                fetch = self._fetches.get((node, url))
                if pinned and fetch is not None and fetch.layers is not None:
                    return  # it would begin the fetch, and without these layers first; it is decided again afterwards
                request = (
                    {"op": "fetch", "url": url, "sources": None, "pin": True, "version": ""}
                    if pinned
                    else {"op": "unpin", "url": url}
                )
                self.start_task(("pin", node, url), self._call(node, request))
            case Pace(node, bytes_per_s):
                self.start_task(("pace", node), self._call(node, {"op": "pace", "bytes_per_s": bytes_per_s}))
            case RequestNodes():
                self._wanted_nodes = decision
                self.start_task(("nodes",), self._request_nodes())
            case SetSpare(node, spare):
                self._state.set_spare(node, spare=spare)
            case ChangeRole():
                instance = self._state.instances.get(decision.id)
                if instance is not None:
                    self._begin_release(instance, decision.reason)

    def look_after_helpers(self) -> None:
        """Look what has become of the instances that prefill for others."""
        for instance in self.live.update():
            self._begin_release(instance, "the one that it prefilled for ends")

    def _begin_release(self, instance: KnownInstance, reason: str) -> None:
        """Let an instance that prefills for another one decode instead."""
        if instance.helping and instance.role == "prefill" and instance.state != "draining":
            instance.role = instance.wanted_role = "decode"
            instance.loading = True
            text = f"{instance.id} will take requests of its own: {reason}"
            self._state.record_event("role", text, node=instance.node, model=instance.model)
            self.start_task(("release", instance.id), self._release(instance))

    async def _release(self, instance: KnownInstance) -> None:
        while instance.helping and self._state.is_wanted(instance):
            try:
                await self._nodes.call(instance.node, {"op": "release", "id": instance.id}, _CALL_S)
                return
            except MedusaError as error:
                logger.warning("%s could not be released: %s", instance.id, error)
                await asyncio.sleep(_SHORTEST_PAUSE_S)

    def may_start(self, decision: StartInstance) -> bool:
        """Return whether a start may begin: it is new, and its model has no failed start that was just now."""
        state = self._state
        _, not_before = self._failures.get(decision.model, (0, 0.0))
        unknown = decision.model not in state.deployments or decision.node not in state.nodes
        return not unknown and decision.id not in state.instances and time.monotonic() >= not_before

    def _begin_start(self, decision: StartInstance) -> None:
        state = self._state
        if not self.may_start(decision):
            return
        instance = KnownInstance(
            decision.id, decision.model, decision.node, "starting", time.monotonic(), role=decision.role,
            wanted_role=decision.role,
        )  # fmt: skip
        instance.predicted_s = decision.ttft_s
        instance.set_deployment(state.deployments[decision.model], state.nodes[decision.node], decision.device_bytes)
        state.instances[decision.id] = instance
        reason = f": {decision.reason}" if decision.reason else ""
        state.record_event(
            "scale-up", f"{decision.id} starts on {decision.node}{reason}", node=decision.node, model=decision.model
        )
        state.publish()
        self.start_task(("start", decision.id), self._start(instance, decision.partner))

    async def _start(self, instance: KnownInstance, partner: str | None) -> None:
        state = self._state
        try:
            await self._wait_for_drops(instance.node)
            if not state.is_wanted(instance):
                return
            deployment = state.deployments[instance.model].to_json()
            request: dict[str, Any] = {"op": "start", "id": instance.id, "deployment": deployment}
            request["device_bytes"] = instance.device_bytes
            if (plan := await self.live.plan(instance, partner)) is not None:
                request["group"] = plan
            if not state.is_wanted(instance):
                return
            await self._nodes.call(instance.node, request, _START_S)
        except Exception as error:  # any: an instance that stayed "starting" would never be started again
            if not isinstance(error, MedusaError):
                logger.exception("the start of %s failed", instance.id)
            if state.is_wanted(instance):
                self.note_failed(instance.id, str(error))
                del state.instances[instance.id]
                state.record_event("start-failed", f"{instance.id}: {error}", node=instance.node, model=instance.model)
                state.publish()
            return
        if instance.state == "starting":
            instance.state, instance.since_s = "ready", time.monotonic()
        state.publish()

    def note_failed(self, instance_id: str, reason: str) -> bool:
        """Note that an instance ended by itself, and why. Return False if that was noted before.

        Its model is started again after a pause, which doubles with each failed start.
        """
        now = time.monotonic()
        if instance_id in self._failed_ids:
            return False
        self._failed_ids = {key: at for key, at in self._failed_ids.items() if at > now - _STOPPED_KEPT_S}
        self._failed_ids[instance_id] = now
        instance = self._state.instances.get(instance_id)
        if instance is not None and instance.state != "draining":
            # An instance that has served may be started again at once. One that never did would probably fail again.
            lasted = instance.answers and instance.state == "ready" and now - instance.since_s > _LONGEST_PAUSE_S / 6
            count = 0 if lasted else self._failures.get(instance.model, (0, 0.0))[0] + 1
            if not lasted:
                self._avoid_sharing(instance)
            if not self._state.is_outdated(instance):
                self._reasons[instance.model] = reason
            self._failures[instance.model] = (count, now + doubling_pause_s(count, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S))
        return True

    def _avoid_sharing(self, instance: KnownInstance) -> None:
        """Avoid groups and live scaling where an instance that shared its model ended soon after its start.

        Perhaps its engine cannot split the model.
        """
        deployment = self._state.deployments.get(instance.model)
        if deployment is not None and deployment.disaggregated:
            if instance.wanted_role == "prefill":
                self.live.note_not_prefilling(instance.model)
            return
        shares = instance.group is not None or instance.meets is not None or instance.helps is not None
        if shares and deployment is not None:
            self._models.avoid_groups(deployment.url, time.monotonic())

    def _begin_stop(self, decision: StopInstance) -> None:
        instance = self._state.instances.get(decision.id)
        if instance is None or instance.state == "draining" or ("stop", instance.id) in self._running:
            return  # or it was just resumed, and the answer to the last order is on its way: decided again, if need be
        instance.state, instance.since_s = "draining", time.monotonic()
        reason = f": {decision.reason}" if decision.reason else ""
        self._state.record_event("scale-down", f"{instance.id} ends{reason}", node=instance.node, model=instance.model)
        self._state.publish()
        self.start_task(("stop", instance.id), self._stop(instance, decision.drain_s))

    async def _stop(self, instance: KnownInstance, drain_s: float) -> None:
        request = {"op": "stop", "id": instance.id, "drain_s": drain_s}
        while instance.node in self._state.nodes and self._state.nodes[instance.node].lost_at is None:
            try:
                answer = await self._nodes.call(instance.node, request, drain_s + _CALL_S)
                ended = bool(answer.get("ended", True))
            except Exception as error:  # noqa: BLE001 - any: it must not stay "draining" because of one bad answer
                logger.warning("%s could not be ended: %s", instance.id, error)
                await asyncio.sleep(_SHORTEST_PAUSE_S)
                if instance.state != "draining":
                    return
                continue
            if not ended:
                self._note_resumed(instance)
                return
            # Only after an order has arrived. Otherwise the node may come back with the instance, which then counts.
            self._stopped = {key: at for key, at in self._stopped.items() if at > time.monotonic() - _STOPPED_KEPT_S}
            self._stopped[instance.id] = time.monotonic()
            break
        if self._state.instances.get(instance.id) is instance:
            del self._state.instances[instance.id]
        self._state.publish()

    def _begin_resume(self, decision: ResumeInstance) -> None:
        instance = self._state.instances.get(decision.id)
        if instance is not None and instance.state == "draining":
            self.start_task(("resume", instance.id), self._resume(instance, decision.reason))

    async def _resume(self, instance: KnownInstance, reason: str) -> None:
        """Have a node let an instance go on that drains; where it is too late, it is gone soon, and another starts."""
        try:
            answer = await self._nodes.call(instance.node, {"op": "resume", "id": instance.id}, _CALL_S)
        except MedusaError as error:
            logger.warning("%s could not be resumed: %s", instance.id, error)
            return
        if answer.get("resumed"):
            self._state.record_event(
                "scale-up", f"{instance.id} goes on: {reason}", node=instance.node, model=instance.model
            )
            self._note_resumed(instance)

    def _note_resumed(self, instance: KnownInstance) -> None:
        if self._state.instances.get(instance.id) is instance and instance.state == "draining":
            instance.state, instance.since_s = "ready", time.monotonic()
            self._state.publish()

    def forgive(self, model: str) -> None:
        """Start a model again at once whose last starts have failed."""
        self._failures.pop(model, None)
        self._reasons.pop(model, None)

    def failure(self, model: str) -> str | None:
        """Return why the last start of a model failed. None if an instance has answered since."""
        return self._reasons.get(model)

    def end_all(self, model: str, reason: str) -> None:
        """End all instances of a model after their requests."""
        self.forgive(model)
        for instance in [item for item in self._state.instances.values() if item.model == model]:
            self._begin_stop(StopInstance(instance.id, instance.node, reason=reason))

    def was_stopped(self, instance_id: str) -> bool:
        """Return whether the instance was ended by an order. An older status may still show it."""
        return instance_id in self._stopped

    def busy_with(self, instance_id: str) -> bool:
        return any((kind, instance_id) in self._running for kind in ("start", "stop"))

    def _begin_fetch(self, decision: Fetch) -> None:
        key = (decision.node, decision.url)
        before = self._fetches.get(key)
        now = time.monotonic()
        if before is not None and before.sources == decision.sources and now - before.at < _FETCH_SHOWN_S:
            return
        if now < self._failed_fetches.get(key, (0, 0.0))[1]:
            return
        self._fetches[key] = KnownFetch(
            decision.node, decision.url, decision.sources, decision.pin, now, decision.layers
        )
        if decision.layers is None:
            self.fetch(decision)

    def fetch(self, decision: Fetch, layers: str | None = None) -> None:
        """Order a node to fetch a model. ``layers`` is START:STOP, the layers that a group's worker needs first."""
        key, nodes = (decision.node, decision.url), self._state.nodes
        request = {
            "op": "fetch",
            "url": decision.url,
            "sources": [nodes[name].url for name in decision.sources if name in nodes],
            "pin": decision.pin,
            "version": self._state.newest_version(decision.url),
            **({} if layers is None else {"layers": layers}),
        }
        origin = " from " + ", ".join(decision.sources) if decision.sources else ""
        self._state.record_event("fetch", f"{decision.node} fetches {decision.url}{origin}", node=decision.node)
        self.start_task(("fetch", *key), self._call_after_drops(decision.node, request))

    def fetches(self, now: float) -> list[KnownFetch]:
        """Return the fetches that were decided and are not complete. Forgets those that their nodes never show."""
        for key, fetch in list(self._fetches.items()):
            node = self._state.nodes.get(fetch.node)
            if node is None or node.lost_at is not None:
                del self._fetches[key]
                continue
            shown = node.shown()
            there = fetch.url in shown and shown[fetch.url]["state"] == "done"
            if there and node.seen_at >= fetch.at + _ORDERED_S:  # else it may be the copy before this fetch
                del self._fetches[key]
                self._failed_fetches.pop(key, None)
                continue
            failure = self._failure(node, fetch, shown)
            if failure is not None:
                del self._fetches[key]
                self._fetch_failed(key, failure, now)
            elif fetch.url not in shown and now - fetch.at > _FETCH_SHOWN_S:
                del self._fetches[key]
        return list(self._fetches.values())

    @staticmethod
    def _failure(node: KnownNode, fetch: KnownFetch, shown: Mapping[str, Mapping[str, Any]]) -> str | None:
        """Return why a fetch has failed, by a status that is newer than the order. None if it has not."""
        if node.seen_at < fetch.at + _ORDERED_S:
            return None
        reason = node.status.get("failed_fetches", {}).get(fetch.url)
        failed = shown.get(fetch.url, {}).get("state") == "failed"
        return str(reason) if reason else "its region failed" if failed else None

    def _fetch_failed(self, key: tuple[str, str], failure: str, now: float) -> None:
        """Report a failed fetch, and allow it again after a pause, which doubles from one second to a minute."""
        node, url = key
        count = self._failed_fetches.get(key, (0, 0.0))[0] + 1
        nodes, deployed = self._state.nodes, {item.url for item in self._state.deployments.values()}
        self._failed_fetches = {
            each: found for each, found in self._failed_fetches.items() if each[0] in nodes and each[1] in deployed
        }
        self._failed_fetches[key] = (count, now + doubling_pause_s(count, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S))
        self._state.record_event("fetch-failed", f"{node} could not fetch {url}: {failure}", node=node)

    def planned_sources(self, node: str, url: str) -> tuple[str, ...]:
        """Return the names of the nodes from which this node was told to read a model."""
        fetch = self._fetches.get((node, url))
        return () if fetch is None else fetch.sources

    def sources(self, node: str, url: str, holders: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the nodes from which this node should read a model, best first.

        With a plan, these are the plan's sources, then ``holders``, the nodes with a complete copy. Without a plan the
        node has begun to fetch by itself, for example because it lost its copy. Then it reads from ``holders``, or if
        there are none, from nodes that are fetching the model. Its fetch is noted, so that the next node reads from it.
        """
        # Those that fetch anew may have lost their copy.
        holders = tuple(name for name in holders if (name, url) not in self._fetches)
        planned = self._fetches.get((node, url))
        if planned is not None:
            return tuple(dict.fromkeys((*planned.sources, *holders)))
        found = holders or tuple(self._fetching(url, node))[:_MOST_SOURCES]
        if node in self._state.nodes and any(item.url == url for item in self._state.deployments.values()):
            self._fetches[node, url] = KnownFetch(node, url, found, pin=False, at=time.monotonic())
        return found

    def _fetching(self, url: str, reader: str) -> list[str]:
        """Return the nodes that fetch a whole model, the last first, without those that read behind ``reader``."""
        fetches = {fetch.node: fetch for fetch in self._fetches.values() if fetch.url == url and fetch.layers is None}
        behind, pending = {reader}, [reader]
        while pending:
            before = pending.pop()
            more = [name for name, fetch in fetches.items() if before in fetch.sources and name not in behind]
            behind.update(more)
            pending += more
        return [name for name in reversed(fetches) if name not in behind]

    async def _request_nodes(self) -> None:
        """Pass the wanted number of nodes on to the autoscaler, and repeat that until it has arrived."""
        requested = None
        while requested != self._wanted_nodes:
            wanted = self._wanted_nodes
            try:
                await self._nodes.request_nodes(wanted.total, wanted.devices)
            except MedusaError as error:
                logger.warning("%s", error)
                await asyncio.sleep(_SHORTEST_PAUSE_S)
            else:
                requested = wanted

    async def _call(self, node: str, request: dict[str, Any]) -> None:
        try:
            await self._nodes.call(node, request, _CALL_S)
        except MedusaError as error:
            logger.warning("%s did not %s: %s", node, request["op"], error)

    async def _call_after_drops(self, node: str, request: dict[str, Any]) -> None:
        await self._wait_for_drops(node)
        await self._call(node, request)

    async def _wait_for_drops(self, node: str) -> None:
        """Wait until a node has dropped what it was told to drop, because something else needs the memory."""
        drops = [task for key, task in self._running.items() if key[:2] == ("drop", node)]
        if drops:
            await asyncio.wait(drops)

    def start_task(self, key: tuple[str, ...], work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in the background, unless work with the same key is under way."""
        if key in self._running:
            work.close()
            return
        task = asyncio.create_task(work)
        self._running[key] = task

        def done(task: asyncio.Task[None]) -> None:
            self._running.pop(key, None)
            if not task.cancelled() and task.exception() is not None:
                logger.error("%s failed", " ".join(key), exc_info=task.exception())
            self._state.wake()

        task.add_done_callback(done)

    async def close(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
