"""The nodes that are given back to an autoscaler, which ends only unused nodes, and those that are taken back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from .claims import Shortage
from .index import Index
from .pool import room
from .state import Node, SetSpare


@dataclass(frozen=True, slots=True)
class IdleNodes:
    """The nodes that could be given back → since when they have had no instance."""

    since_s: Mapping[str, float] = field(default_factory=dict)


def take_back(nodes: Mapping[str, Node], shortages: Collection[Shortage]) -> list[SetSpare]:
    """Take back nodes with the slots that could be used, or fewer if there are not enough; they lower the shortages."""
    found = []
    for name in sorted(name for name, node in nodes.items() if node.spare and node.state != "lost"):
        helped = [one for one in shortages if one.useful > 0 and one.bound.slots(nodes[name])]
        if not helped:
            continue
        found.append(SetSpare(name, spare=False))
        for one in helped:
            slots = one.bound.slots(nodes[name])
            one.useful, one.missing = one.useful - slots, one.missing - slots
    return found


def give_back(
    nodes: Mapping[str, Node], index: Index, idle: IdleNodes, now_s: float, *, least: int, after_s: float
) -> tuple[list[SetSpare], IdleNodes]:
    """Give back one node that has had no instance for ``after_s``.

    At least ``least`` nodes stay, and they have to hold all of the pool's copies. The node that was idle the longest
    goes first; among equals, the one with the fewest bytes of the pool.
    """
    free = [name for name in index.free if not nodes[name].instances and not nodes[name].stays]
    since_s = {name: idle.since_s.get(name, now_s) for name in free}
    pinned = index.pinned_bytes
    if len(pinned) <= least:
        return [], IdleNodes(since_s)
    ready = [name for name in free if now_s - since_s[name] >= after_s]
    rooms = {name: room(nodes[name]) for name in pinned} if ready else {}
    total = sum(rooms.values())
    for name in sorted(ready, key=lambda name: (since_s[name], pinned[name], name)):
        if pinned[name] <= total - rooms[name]:
            return [SetSpare(name)], IdleNodes(since_s)
    return [], IdleNodes(since_s)
