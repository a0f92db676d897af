"""The reasons for which a deployment has no instance: no node can ever run one, or it waits for a place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..deployment import Deployment
from ..policy.state import Load
from ..policy.waiting import Wait
from .nodes import KnownNode
from .state import State

_WAITS_S = 1.0  # shorter ones, as until a GPU's memory is free, are no event


@dataclass
class _Waiting:
    needs: str
    since: float  # monotonic
    recorded: bool = False


class Obstacles:
    """Events for models that are asked for and have no instance: one each, until the reason is another."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._never: dict[str, str | None] = {}  # model → why it starts on no node, as was recorded
        self._waiting: dict[str, _Waiting] = {}

    def record(self, loads: Mapping[str, Load], waiting: Mapping[str, Wait], now: float) -> None:
        """Record what is new. ``waiting``: what the models wait for that the policy could not place."""
        deployments = self._state.deployments
        self._never = {name: text for name, text in self._never.items() if name in deployments}
        self._waiting = {name: found for name, found in self._waiting.items() if name in waiting}
        for name, deployment in deployments.items():
            if name not in waiting and not deployment.min and (name not in loads or not loads[name].waiting):
                continue
            found = obstacle(deployment, self._state.nodes.values())
            if found is not None and found != self._never.get(name):
                self._state.record_event("no-node", found, model=name)
            self._never[name] = found
            if found is None and name in waiting:
                self._record_wait(name, waiting[name], now)

    def _record_wait(self, name: str, wait: Wait, now: float) -> None:
        known = self._waiting.get(name)
        if known is None or known.needs != wait.needs:
            known = self._waiting[name] = _Waiting(wait.needs, now)
        if not known.recorded and now - known.since >= _WAITS_S:
            known.recorded = True
            self._state.record_event("waits", f"{name} waits for {wait.needs}: {wait.found}", model=name)


def _gpus_together(node: KnownNode) -> int:
    """Return how many of a node's GPUs one instance can have."""
    count = int(node.status.get("devices", 0))
    return min(count, 1) if node.status.get("devices_apart") else count


def obstacle(deployment: Deployment, nodes: Iterable[KnownNode]) -> str | None:
    """Return why no instance of a deployment can start on any of these nodes, and what is expected; None if one can."""
    if not deployment.device_kind and deployment.device != "cuda" and deployment.gpus == 1:
        return None
    known = [node for node in nodes if node.status and node.lost_at is None]
    kind, name = deployment.device_kind, deployment.name
    fitting = [node for node in known if kind in ("", node.status.get("device_kind", ""))]
    if known and not fitting:
        return f"{name} starts on no node: expected one with --device-kind {kind}, found none"
    gpus = [_gpus_together(node) for node in fitting]
    of_kind = f" with --device-kind {kind}" if kind else ""
    if gpus and deployment.device == "cuda" and not any(gpus):
        return f"{name} starts on no node: expected one{of_kind} with a GPU for --set device=cuda, found none"
    if any(gpus) and deployment.device != "cpu" and max(gpus) < deployment.gpus:  # CPUs are for clusters without GPUs
        needed = f"{deployment.gpus} GPUs for --set tensor-parallel={deployment.gpus}"
        return f"{name} starts on no node: expected one{of_kind} with {needed}, found {max(gpus)} at most"
    return None
