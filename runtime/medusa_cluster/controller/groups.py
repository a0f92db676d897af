"""The controller's side of groups of workers: they are started, turned into instances, and ended."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from medusa_runtime.errors import ClusterError, MedusaError

from ..group.ranges import layer_settings, split
from ..policy.state import Consolidate, Fetch, StartInstance, StopInstance
from .execution import Execution
from .models import Models
from .nodes import KnownInstance, Nodes, group_address
from .state import State

logger = logging.getLogger(__name__)

_CALL_S = 10.0
_START_S = 90.0
_AGAIN_S = 1.0


class Groups:
    """The groups of the cluster. Only their leaders are in the routes; the other workers are known, too.

    The nodes' status shows what becomes of a group: its leader may go on alone, or be consolidated as ordered.
    """

    def __init__(self, state: State, nodes: Nodes, models: Models, execution: Execution) -> None:
        self._state = state
        self._nodes = nodes
        self._models = models
        self._execution = execution
        self._begun: defaultdict[str, list[StartInstance]] = defaultdict(list)  # of this tick

    def add(self, start: StartInstance) -> None:
        """Note the start of one worker. Call ``begin`` once all workers of its group are noted."""
        assert start.group is not None
        self._begun[start.group].append(start)

    def begin(self) -> None:
        """Start the groups whose workers were noted in this tick."""
        begun, self._begun = self._begun, defaultdict(list)
        for group, starts in begun.items():
            if all(self._execution.may_start(start) for start in starts):
                self._begin(group, starts)

    def _begin(self, group: str, starts: list[StartInstance]) -> None:
        state = self._state
        starts.sort(key=lambda start: start.layers or (0, 0))
        workers = [
            KnownInstance(
                start.id, start.model, start.node, "starting", time.monotonic(), role=start.role, group=group,
                rank=rank, layers=start.layers, full=start.full, predicted_s=start.ttft_s, workers=len(starts),
                loading=True,
            )
            for rank, start in enumerate(starts)
        ]  # fmt: skip
        for worker, start in zip(workers, starts, strict=True):
            worker.set_deployment(state.deployments[worker.model], state.nodes[worker.node], start.device_bytes)
            state.instances[worker.id] = worker
        names = ", ".join(worker.node for worker in workers)
        predicted = f", the first token in {starts[0].ttft_s:.2f} s" if starts[0].ttft_s else ""
        first = workers[0]
        state.record_event("group", f"{group} starts on {names}{predicted}", node=first.node, model=first.model)
        state.publish()
        self._execution.start_task(("start", first.id), self._start(group, workers))

    async def _start(self, group: str, workers: list[KnownInstance]) -> None:
        state = self._state
        try:
            await self._start_workers(group, workers)
        except Exception as error:  # any: workers that stayed "starting" would never be started again
            if not isinstance(error, MedusaError):
                logger.exception("the start of the group %s failed", group)
            if any(map(state.is_wanted, workers)):  # else the whole group was ended
                self._give_up(group, workers, error)
        state.publish()

    async def _start_workers(self, group: str, workers: list[KnownInstance]) -> None:
        state, leader = self._state, workers[0]
        deployment = state.deployments[leader.model]
        model = self._models.get(deployment.url)
        if model is None:
            raise ClusterError(f"{deployment.url} is not described")
        layers = layer_settings(split(model.bytes, len(workers)))
        for worker, part in zip(workers, layers, strict=True):
            sources = self._execution.planned_sources(worker.node, deployment.url)
            self._execution.fetch(Fetch(worker.node, deployment.url, sources), part)
        place = await group_address(self._nodes, state.nodes[leader.node])
        if not all(map(state.is_wanted, workers)):
            raise ClusterError("one of its workers was ended before it was started")
        common = {"group": group, "token": secrets.token_hex(16), "size": len(workers), "then": "stay"}
        common["leader"] = place
        calls = [
            self._start_worker(worker, {**common, "rank": worker.rank, "full": worker.full, "layers": part})
            for worker, part in zip(workers, layers, strict=True)
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _start_worker(self, worker: KnownInstance, group: Mapping[str, Any]) -> None:
        deployment = self._state.deployments[worker.model].to_json()
        request: dict[str, Any] = {"op": "start", "id": worker.id, "deployment": deployment, "group": dict(group)}
        request |= {"device_bytes": worker.device_bytes}
        await self._nodes.call(worker.node, request, _START_S)
        if worker.state == "starting":
            worker.state, worker.since_s = "ready", time.monotonic()

    def _give_up(self, group: str, workers: list[KnownInstance], error: Exception) -> None:
        """End the workers of a group that could not be started. For a while, single instances start instead."""
        state, leader = self._state, workers[0]
        state.record_event("start-failed", f"{group}: {error}", node=leader.node, model=leader.model)
        self._models.avoid_groups(state.deployments[leader.model].url, time.monotonic())
        for worker in workers:
            if worker.id in state.instances:
                self._execution.begin(StopInstance(worker.id, worker.node, 0.0, "its group could not be started"))

    def consolidate(self, decision: Consolidate) -> None:
        """Order a group's leader to turn some of its workers into instances."""
        leader = self._leader(decision.group)
        if leader is None:
            return
        text = f"{decision.group} becomes {len(decision.keep)} of its workers: {decision.reason}"
        self._state.record_event("consolidate", text, node=leader.node, model=leader.model)
        self._execution.start_task(("consolidate", decision.group), self._consolidate(leader, len(decision.keep)))

    async def _consolidate(self, leader: KnownInstance, keep: int) -> None:
        request = {"op": "consolidate", "id": leader.id, "keep": keep}
        while leader.group is not None and leader.id in self._state.instances:
            try:
                await self._nodes.call(leader.node, request, _CALL_S)
                return
            except MedusaError as error:
                logger.warning("%s could not be consolidated: %s", leader.group, error)
                await asyncio.sleep(_AGAIN_S)

    def update(self) -> None:
        """Update the groups by the nodes' last status."""
        groups: defaultdict[str, list[KnownInstance]] = defaultdict(list)
        for item in self._state.instances.values():
            if item.group is not None and item.state != "draining":
                groups[item.group].append(item)
        if not groups:
            return
        leaders = self._shown_leaders()
        for group, workers in groups.items():
            leader = next((item for item in workers if item.rank == 0), None)
            shown = leaders.get(group, {})
            if shown.get("state") in ("alone", "consolidated"):
                self._finish(group, workers, shown)
            elif leader is None:
                for worker in workers:
                    self._end(worker, "its group has lost its leader")
            else:
                complete = self._is_complete(leader)
                for worker in workers:
                    worker.loading = worker.rank > 0 and not complete

    def _finish(self, group: str, workers: list[KnownInstance], shown: Mapping[str, Any]) -> None:
        became = str(shown["state"])
        keep = int(shown.get("keep", 1)) if became == "consolidated" else 1
        text = (
            f"{group} is {keep} of its workers now" if became == "consolidated" else f"the leader of {group} is alone"
        )
        self._state.record_event(f"group-{became}", text, node=workers[0].node, model=workers[0].model)
        for worker in workers:
            if worker.rank < keep:
                worker.group, worker.rank, worker.layers, worker.loading, worker.full = None, 0, None, False, True
            else:
                self._end(worker, "its group has ended")
        self._state.publish()

    def _end(self, worker: KnownInstance, reason: str) -> None:
        self._execution.begin(StopInstance(worker.id, worker.node, 0.0, reason))

    def _leader(self, group: str) -> KnownInstance | None:
        found = self._state.instances.values()
        return next((item for item in found if item.group == group and item.rank == 0), None)

    def _shown_leaders(self) -> dict[str, Mapping[str, Any]]:
        """Return the state of each group in the status of its leader's node, by the group's id."""
        nodes = [node for node in self._state.nodes.values() if node.lost_at is None]
        shown = [item["group"] for node in nodes for item in node.status.get("instances", ()) if item.get("group")]
        return {str(found["id"]): found for found in shown if found["rank"] == 0}

    def _is_complete(self, leader: KnownInstance) -> bool:
        """Return whether the leader's node has the whole model, so that the leader can be an instance."""
        node, deployment = self._state.nodes.get(leader.node), self._state.deployments.get(leader.model)
        if node is None or deployment is None:
            return False
        return any(model["url"] == deployment.url and model["state"] == "done" for model in node.models())
