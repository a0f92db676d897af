"""The replacement of outdated instances: of an older version of the model, or of a deployment that has changed.

They are replaced one by one, and each serves until a new one is ready: so as many serve all the time as the load needs,
and room for one more is enough.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

from .counting import RoleCount
from .placement import Placement
from .pool import is_current
from .state import Deployment, Instance

CHANGED = "its deployment has changed"


class Replacement(NamedTuple):
    """One step: instances that end, with the reasons; how many start; and those of which one is to be replaced."""

    ends: list[tuple[Instance, str]]
    missing: int
    next: list[Instance]


def replacement(count: RoleCount, given_up: Container[str]) -> Replacement:
    """Return the next step. ``given_up``: the instances, by id, whose places others need."""
    new, starting = count.ready - len(count.outdated), count.current - count.ready
    kept = min(len(count.outdated), max(count.wanted - new, 0))

    def order(one: Instance) -> tuple[Any, ...]:
        return one.id not in given_up, *dispensable(one)

    old = sorted(count.outdated, key=order)
    number = len(old) - kept
    ends = [(one, why(one)) for one in old[:number]]
    missing = count.wanted - kept - new - starting
    if kept + new >= count.wanted:  # one that starts is the next to replace another
        spare = [one for one in count.instances if one.state == "starting" and one.group is None]
        ends += [(one, "the load needs fewer") for one in sorted(spare, key=order)[: max(starting - 1, 0)]]
    return Replacement(ends, max(missing, 0), [] if ends or starting or missing > 0 else old[number:])


def place(placement: Placement, deployment: Deployment, old: Iterable[Instance], planned: str | None) -> str | None:
    """Return where an instance starts in place of one of these. None if there is no room before one of them ends.

    It computes on what they compute on. ``planned``: a node that is about to receive the model.
    """
    node, nodes = placement.choose(deployment, planned), placement.nodes
    used = {nodes[one.node].processor(deployment.device).on_gpu for one in old if one.node in nodes}
    if node is not None and (not used or nodes[node].processor(deployment.device).on_gpu in used):
        return node
    return next((one.node for one in old if one.changed and _has_room_beside(placement, deployment, one)), None)


def _has_room_beside(placement: Placement, deployment: Deployment, old: Instance) -> bool:
    """Return whether a node's memory has room for a new instance beside an old one, and both use its processor.

    They take one place until the old one ends.
    """
    node = placement.nodes[old.node]
    if node.computes_on_device(deployment.device) or node.computes_on_device(old.device):
        return False
    held = node.copy(deployment.url)
    room_bytes = node.free_bytes if node.memory_bytes else math.inf
    fits = (held is not None and is_current(held, deployment)) or 0 < deployment.size_bytes <= room_bytes
    return fits and placement.is_for(node, deployment)


def why(instance: Instance) -> str:
    """Return why an outdated instance is replaced."""
    return CHANGED if instance.changed else "its model was replaced in the store"


def can_resume(instance: Instance, count: RoleCount) -> bool:
    """Return whether a draining instance can stand in for one that is missing: alone, in its role, up to date."""
    version = count.deployment.version
    role = (instance.role == "decode") == (count.role == "decode")
    same = (instance.version or version) == version and not instance.changed
    return instance.group is None and instance.full and role and same


def dispensable(instance: Instance) -> tuple[bool, int, float, str]:
    """Return a sort key for ending instances: starting and deserted ones first, then by requests, then young ones."""
    return instance.state == "ready" and not instance.deserted, instance.running, -instance.since_s, instance.id


__all__ = ["CHANGED", "can_resume", "dispensable", "place", "replacement", "why"]
