"""Turns: which models have an instance while there are more models than places, and the nodes reserved for them.

Turns are counted in accelerators, and those of one node end at different times. If each went to the model that waits
longest, a model that needs several of one node would never find them. So it reserves a node, the one where the turns of
others end first: what serves there goes on after its turn, until it can all end at once. That is how backfilling batch
schedulers start large jobs (EASY).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ..deployment import Device
from .counting import RoleCount
from .placement import Placement, room_shape
from .scaling import Turn
from .state import Deployment, Instance, Load, Node

TURN_S = 30.0
_STARTS = 4.0  # a turn is at least so many times as long as the model's starts
_LEAST_IDLE_S = 1.0


def turn(count: RoleCount, load: Load, now_s: float, turn_s: float | None = TURN_S) -> Turn:
    """Rank a model among those that cannot all have an instance. The lowest ones get one.

    A model that serves keeps its place for ``turn_s`` times its weight. Then it loses it to one whose requests have
    waited for ``turn_s``, so that all get a turn, and few of them begin with a start. One that has had no request for
    as long as its next start would take comes after those that have some: what it costs to keep its place is then at
    most twice what the best choice would have cost (the ski rental problem). All are equal if ``turn_s`` is None.
    """
    if turn_s is None:
        return Turn()
    if not count.current:
        late = load.longest_wait_s >= turn_s
        return Turn(1 if late else 3, -load.longest_wait_s, starts=True, is_late=late)
    deployment = count.deployment
    start_s = max((measured.times.ttft_s for measured in deployment.measured.values()), default=0.0)
    idle_s = 0.0 if load.waiting or load.running else now_s - load.last_request_s
    if idle_s >= max(min(start_s, turn_s), _LEAST_IDLE_S):
        return Turn(4)
    ready = (instance.since_s for instance in count.instances if instance.state == "ready" and instance.full)
    served_s = now_s - min(ready, default=now_s)
    left_s = max(turn_s, _STARTS * start_s) * deployment.weight - served_s
    return Turn(0 if left_s > 0 else 2, served_s, left_s=max(left_s, 0.0))


class Reservation(NamedTuple):
    """The instances whose places on one node make up one for a model, and when the last of their turns ends."""

    left_s: float
    ends: tuple[tuple[str, Instance], ...]  # count, instance


class Reservations:
    """The reservations of one tick: no node has two."""

    def __init__(self, counts: Mapping[str, RoleCount], turns: Mapping[str, Turn], placement: Placement) -> None:
        self._placement = placement
        self._taken: set[str] = set()
        self._soonest: dict[tuple[Device, int], dict[object, list[tuple[float, int, str]]]] = {}  # need → shape → nodes
        self.on_nodes: dict[str, list[tuple[float, str, Instance]]] = {}  # what may end, the first turns first
        for name, count in counts.items():
            for left_s, instance in _ends(count, turns[name]):
                self.on_nodes.setdefault(instance.node, []).append((left_s, name, instance))
        for ends in self.on_nodes.values():
            ends.sort(key=lambda end: (end[0], end[1], end[2].id))

    def reserve(
        self, deployment: Deployment, suits: Callable[[Node], bool], can_keep: Callable[[Node], bool]
    ) -> Reservation | None:
        """Reserve the node where a place is there first. None if there is none.

        ``suits`` says whether the model has room on nodes of a shape while they are empty, and ``can_keep`` whether a
        node's memory is large enough.
        """
        best: tuple[float, int, str, Reservation] | None = None
        for ones in self._nodes_by_shape(deployment).values():
            if not suits(self._placement.nodes[ones[0][2]]):
                continue
            for left_s, number, name in ones:
                if best is not None and (left_s, number, name) >= best[:3]:
                    break
                node = self._placement.nodes[name]
                if name in self._taken or not can_keep(node):
                    continue
                if (found := self._on(node, deployment)) is not None:
                    best = left_s, number, name, found
                    break
        if best is None:
            return None
        self._taken.add(best[2])
        return best[3]

    def _nodes_by_shape(self, deployment: Deployment) -> dict[object, list[tuple[float, int, str]]]:
        """Return where a place may be, and when, if all free accelerators have room: for all models of this many."""
        key = deployment.device, deployment.devices
        if key not in self._soonest:
            by_shape = self._soonest[key] = {}
            for name, ends in self.on_nodes.items():
                node, left, number = self._placement.nodes[name], 0.0, 0
                lacking = self._placement.slots(name, deployment) - self._placement.free_slots(name, deployment.device)
                for left_s, _, instance in ends:
                    if lacking <= 0:
                        break
                    lacking, left, number = lacking - instance.slots, left_s, number + 1
                if lacking <= node.returning:
                    by_shape.setdefault(room_shape(node), []).append((left, number, name))
            for ones in by_shape.values():
                ones.sort()
        return self._soonest[key]

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


__all__ = ["TURN_S", "Reservation", "Reservations", "turn"]
