"""What a model without an instance waits for, in words."""

from __future__ import annotations

from typing import NamedTuple

from .accelerators import needed_bytes
from .placement import Placement, is_large_enough
from .state import Deployment, Node

_MOST_NAMES = 3


class Wait(NamedTuple):
    """What a model waits for, which stays the same while it does, and why that is not there now."""

    needs: str
    found: str


def wait_of(deployment: Deployment, placement: Placement) -> Wait:
    """Return what a model waits for that found no place in this tick."""
    fitting = [
        node for node in placement.nodes.values() if node.state == "alive" and placement.is_for(node, deployment)
    ]
    with_gpus = [node for node in fitting if node.computes_on_device(deployment.device)]
    enough = [node for node in with_gpus if is_large_enough(node, deployment)] or with_gpus
    either = deployment.device == "auto" and deployment.devices == 1 and len(with_gpus) < len(fitting)
    return Wait(_needs(deployment, with_gpus, either=either), _found(deployment, placement, fitting, enough))


def _needs(deployment: Deployment, with_gpus: list[Node], *, either: bool) -> str:
    kind = f" with --device-kind {deployment.device_kind}" if deployment.device_kind else ""
    if not with_gpus and deployment.device != "cuda":
        return f"a node{kind} on which no other model runs"
    count, needed = deployment.devices, needed_bytes(deployment)
    size = f" with {needed / 1e9:.1f} GB free" if needed and any(node.device_bytes for node in with_gpus) else ""
    gpus = f"a GPU{size}" if count == 1 else f"{count} GPUs of one node{size}{' on each' if size else ''}"
    return gpus + (f" on a node{kind}" if kind else "") + (" or a node without GPUs" if either else "")


def _found(deployment: Deployment, placement: Placement, fitting: list[Node], enough: list[Node]) -> str:
    if not fitting:
        return "there is no such node"
    nodes = enough or fitting
    emptying = [node.name for node in nodes if node.returning or any(one.state == "draining" for one in node.instances)]
    if emptying:
        return f"{_listed(emptying)} has one soon"
    if any(placement.can_hold(node.name, deployment) for node in fitting):
        return f"no node has room in its memory for {deployment.size_bytes / 1e9:.1f} GB of weights"
    free = [node for node in nodes if placement.free_slots(node.name, deployment.device) >= deployment.devices]
    if free and enough:
        roomiest = max(free, key=lambda node: placement.left(node)[:1])
        room = max((one.free_bytes for one in placement.left(roomiest)), default=0)
        return f"of those that are free, the one with the most has {room / 1e9:.1f} GB, on {roomiest.name}"
    models = {instance.model for node in nodes for instance in node.instances}
    return f"those of {_listed([node.name for node in nodes])} are taken" + (f" by {_listed(models)}" if models else "")


def _listed(names: list[str] | set[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _MOST_NAMES
    return ", ".join(ordered[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


__all__ = ["Wait", "wait_of"]
