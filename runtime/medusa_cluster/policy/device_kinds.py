"""Devices of several kinds: models that need one kind come before models that can use any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from .counting import RoleCount
from .index import Index
from .state import Deployment, Instance, Node


def by_kind(counts: Iterable[RoleCount]) -> dict[str, list[RoleCount]]:
    """Return the counts of models that need a kind of device, by kind."""
    found: dict[str, list[RoleCount]] = {}
    for count in counts:
        if count.deployment.device_kind:
            found.setdefault(count.deployment.device_kind, []).append(count)
    return found


def in_the_way(
    counts: Iterable[RoleCount],
    index: Index,
    nodes: Mapping[str, Node],
    deployments: Mapping[str, Deployment],
    can_hold: Callable[[str, Deployment], bool],
) -> Iterator[Instance]:
    """Yield instances that hold the devices which other models need, and can move to devices of another kind.

    Only as many as are missing, and only if there are free devices for them. ``can_hold`` returns whether a node has a
    device with room for a deployment.
    """
    for kind, needing in by_kind(counts).items():
        missing = sum(max(count.wanted - count.current, 0) for count in needing)
        if not missing or any(nodes[name].device_kind == kind for name in index.free):
            continue
        holding = [
            instance
            for instances in index.instances.values()
            for instance in instances.values()
            if nodes[instance.node].device_kind == kind
        ]
        missing -= sum(instance.state == "draining" for instance in holding)
        free = {name: slots for name, slots in index.free.items() if nodes[name].device_kind != kind}
        movable = [
            item
            for item in holding
            if item.state == "ready"
            and item.group is None
            and item.model in deployments
            and not deployments[item.model].device_kind
        ]
        for instance in sorted(movable, key=lambda item: (item.running, -item.since_s, item.id)):
            moved = deployments[instance.model]
            fitting = (
                name
                for name in free
                if (not nodes[name].memory_bytes or nodes[name].memory_bytes >= moved.size_bytes)
                and can_hold(name, moved)
            )
            other = next(fitting, None)
            if missing <= 0 or other is None:
                break
            missing -= 1
            free[other] -= 1
            if not free[other]:
                del free[other]
            yield instance
