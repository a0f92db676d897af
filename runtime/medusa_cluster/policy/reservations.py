"""Nodes that models of several accelerators have for their turns: those where the turns of others end first.

Turns are counted in accelerators, and those of one node end at different times. If each went to the model that waits
longest, a model that needs several of one node would never find them. So it reserves a node: what serves there goes on
after its turn, until it can all end at once. That is how backfilling batch schedulers start large jobs (EASY).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .counting import RoleCount
from .placement import Placement
from .scaling import Turn
from .state import Deployment, Instance, Node


class Reservation(NamedTuple):
    """The instances whose places on one node make up one for a model, and when the last of their turns ends."""

    left_s: float
    ends: tuple[tuple[str, Instance], ...]  # count, instance


class Reservations:
    """The reservations of one tick: no node has two."""

    def __init__(self, counts: Mapping[str, RoleCount], turns: Mapping[str, Turn], placement: Placement) -> None:
        self._placement = placement
        self._taken: set[str] = set()
        self._soonest: dict[tuple[Any, ...], list[tuple[float, int, str, Reservation]]] = {}  # need → the last is next
        self.on_nodes: dict[str, list[tuple[float, str, Instance]]] = {}  # what may end, the first turns first
        for name, count in counts.items():
            for left_s, instance in _ends(count, turns[name]):
                self.on_nodes.setdefault(instance.node, []).append((left_s, name, instance))
        for ends in self.on_nodes.values():
            ends.sort(key=lambda end: (end[0], end[1], end[2].id))

    def reserve(
        self, deployment: Deployment, need: tuple[Any, ...], suitable: Callable[[], Iterable[Node]]
    ) -> Reservation | None:
        """Reserve the node where a place is there first. None if there is none.

        ``suitable`` returns the nodes of ``on_nodes`` on which a model with this ``need`` has room when they are empty.
        """
        if need not in self._soonest:
            found = ((node, self._on(node, deployment)) for node in suitable())
            able = [(one.left_s, len(one.ends), node.name, one) for node, one in found if one is not None]
            self._soonest[need] = sorted(able, key=lambda one: one[:3], reverse=True)
        while self._soonest[need]:
            _, _, name, reservation = self._soonest[need].pop()
            if name not in self._taken:
                self._taken.add(name)
                return reservation
        return None

    def _on(self, node: Node, deployment: Deployment) -> Reservation | None:
        on_device = node.computes_on_device(deployment.device)
        lacking, left, ends = self._placement.lacking(node, deployment), 0.0, []
        for left_s, name, instance in self.on_nodes[node.name]:
            if lacking <= 0:
                break
            if node.computes_on_device(instance.device) == on_device:
                lacking, left = lacking - instance.slots, left_s
                ends.append((name, instance))
        return Reservation(left, tuple(ends)) if lacking <= 0 else None


def _ends(count: RoleCount, turn: Turn) -> Iterable[tuple[float, Instance]]:
    """Yield the instances of a model that may end for others, and in how many seconds: all but its last one at once."""
    able = sorted((one for one in count.instances if one.group is None), key=lambda one: (one.running, -one.since_s))
    spare = count.current - count.deployment.min
    for number, instance in enumerate(able[: max(spare, 0)]):
        yield (0.0 if number < count.current - 1 else turn.left_s), instance


__all__ = ["Reservation", "Reservations"]
