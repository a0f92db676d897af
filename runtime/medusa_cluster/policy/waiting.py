"""What a model without an instance waits for, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..deployment import Device
from .accelerators import needed_bytes
from .placement import Placement, is_large_enough, room_shape
from .state import Deployment, Node

_MOST_NAMES = 3


class Wait(NamedTuple):
    """What a model waits for, which stays the same while it does, and why that is not there now."""

    needs: str
    found: str


class _Alike:
    """Nodes on which the same models have room while they are empty."""

    def __init__(self, node: Node) -> None:
        self.one = node
        self.names: list[str] = []
        self.emptying: list[str] = []
        self.free: list[Node] = []  # with a free slot, for some models
        self.models: set[str] = set()
        self._with_slots: dict[tuple[Device, int], list[Node]] = {}

    def add(self, node: Node, *, is_free: bool) -> None:
        self.names.append(node.name)
        self.models.update(instance.model for instance in node.instances)
        if node.returning or any(one.state == "draining" for one in node.instances):
            self.emptying.append(node.name)
        if is_free:
            self.free.append(node)

    def with_slots(self, placement: Placement, deployment: Deployment) -> list[Node]:
        """Return the nodes with enough free slots for a model, whatever their memory."""
        key = deployment.device, deployment.devices
        if key not in self._with_slots:
            device, devices = key
            self._with_slots[key] = [one for one in self.free if placement.free_slots(one.name, device) >= devices]
        return self._with_slots[key]


def waits(deployments: Mapping[str, Deployment], placement: Placement) -> dict[str, Wait]:
    """Return what models wait for that found no place in this tick, by their names."""
    found = _Waits(placement) if deployments else None
    return {name: found.of(deployment) for name, deployment in deployments.items()} if found else {}


class _Waits:
    """What models wait for. The nodes are looked at once for all of them."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._alike: dict[object, _Alike] = {}
        self._taken: dict[tuple[int, ...], str] = {}  # ids of alike nodes → by whom they are taken, in words
        index = placement.index
        for node in placement.nodes.values():
            if node.state == "alive":
                key = room_shape(node)
                if key not in self._alike:
                    self._alike[key] = _Alike(node)
                self._alike[key].add(node, is_free=node.name in index.free or node.name in index.free_processors)

    def of(self, deployment: Deployment) -> Wait:
        """Return what a model waits for."""
        fitting = [alike for alike in self._alike.values() if self._placement.is_for(alike.one, deployment)]
        with_gpus = [alike for alike in fitting if alike.one.computes_on_device(deployment.device)]
        enough = [alike for alike in with_gpus if is_large_enough(alike.one, deployment)] or with_gpus
        either = deployment.device == "auto" and deployment.devices == 1 and len(with_gpus) < len(fitting)
        needs = _needs(deployment, [alike.one for alike in with_gpus], either=either)
        return Wait(needs, self._found(deployment, fitting, enough))

    def _found(self, deployment: Deployment, fitting: list[_Alike], enough: list[_Alike]) -> str:
        if not fitting:
            return "there is no such node"
        placement, nodes = self._placement, enough or fitting
        if emptying := [name for alike in nodes for name in alike.emptying]:
            return f"{_listed(emptying)} has one soon"
        may_hold = placement.most_room(deployment) >= placement.least_room(deployment)
        if may_hold and any(placement.can_hold(node.name, deployment) for alike in fitting for node in alike.free):
            return f"no node has room in its memory for {deployment.size_bytes / 1e9:.1f} GB of weights"
        free = [node for alike in nodes for node in alike.with_slots(placement, deployment)]
        if free and enough:
            roomiest = max(free, key=lambda node: placement.left(node)[:1])
            room = max((one.free_bytes for one in placement.left(roomiest)), default=0)
            return f"of those that are free, the one with the most has {room / 1e9:.1f} GB, on {roomiest.name}"
        key = tuple(map(id, nodes))
        if key not in self._taken:
            models = {model for alike in nodes for model in alike.models}
            names = [name for alike in nodes for name in alike.names]
            self._taken[key] = f"those of {_listed(names)} are taken" + (f" by {_listed(models)}" if models else "")
        return self._taken[key]


def _needs(deployment: Deployment, with_gpus: list[Node], *, either: bool) -> str:
    kind = f" with --device-kind {deployment.device_kind}" if deployment.device_kind else ""
    if not with_gpus and deployment.device != "cuda":
        return f"a node{kind} on which no other model runs"
    count, needed = deployment.devices, needed_bytes(deployment)
    size = f" with {needed / 1e9:.1f} GB free" if needed and any(node.device_bytes for node in with_gpus) else ""
    gpus = f"a GPU{size}" if count == 1 else f"{count} GPUs of one node{size}{' on each' if size else ''}"
    return gpus + (f" on a node{kind}" if kind else "") + (" or a node without GPUs" if either else "")


def _listed(names: list[str] | set[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _MOST_NAMES
    return ", ".join(ordered[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


__all__ = ["Wait", "waits"]
