"""Fair shares of a full cluster: the models have as many instances as there are slots for."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from .claims import Claim, Shortage, bounds, needs_devices
from .counting import RoleCount
from .index import Index
from .placement import Placement, is_large_enough, room_shape
from .scaling import Turn, shares
from .state import Deployment, Instance, Node
from .turns import Reservation, Reservations


class Shared(NamedTuple):
    """The consequences of sharing a full cluster."""

    shortages: list[Shortage]  # what there is too little of, on nodes of all kinds
    given_up: frozenset[str] = frozenset()  # instances whose places others need: of a model that loses some, the first
    given_room: frozenset[str] = frozenset()  # models for which that makes all of a place


def share(
    counts: list[RoleCount],
    index: Index,
    placement: Placement,
    lacking: Container[str],
    may_start: Callable[[Deployment], bool],
    turn: Callable[[RoleCount], Turn],
) -> Shared:
    """Cut the counts down to what the cluster has.

    A model without an instance that cannot start anywhere, as ``may_start`` says, takes no share from others. Nor does
    one of those that are ``lacking`` one for which no place is free, becomes free, or is given up by models that lose
    an instance. Of models that cannot all have an instance, those whose ``turn`` is the lowest have one.
    """
    claims = [Claim.of(count.deployment) for count in counts]
    exceeded, shortages = [], []
    for bound in bounds(index.shapes, claims):
        sharing = [(count, bound.slots_of.get(claim, 0)) for count, claim in zip(counts, claims, strict=True)]
        useful = sum(count.wanted * slots for count, slots in sharing) - bound.capacity
        if useful <= 0:
            continue
        exceeded.append((bound.capacity, [(count, slots) for count, slots in sharing if slots]))
        if bound.of_all_kinds:
            least = sum(max(count.least, count.deployment.min) * slots for count, slots in sharing)
            shortages.append(Shortage(bound, useful, max(least - bound.capacity, 0)))
    if not exceeded:
        return Shared(shortages)
    able = {_name(count) for count in counts if count.current or may_start(count.deployment)}
    cuts = [(capacity, [one for one in cut if _name(one[0]) in able]) for capacity, cut in exceeded]
    turns = {_name(count): turn(count) for count in counts if _name(count) in able}
    return Shared(shortages, *_divide_all(cuts, _Places(index, placement, lacking), turns))


def _divide_all(
    cuts: Sequence[tuple[int, list[tuple[RoleCount, int]]]], places: _Places, turns: Mapping[str, Turn]
) -> tuple[frozenset[str], frozenset[str]]:
    """Cut the counts down to the capacities. What one would get in vain goes to the others.

    Returns the instances that are to give up their places, and the models for which that makes all of a place.
    """
    counts = {_name(count): count for _, cut in cuts for count, _ in cut}
    demands, turns = {name: count.wanted for name, count in counts.items()}, dict(turns)
    reservations: Reservations | None = None
    reserved: set[str] = set()  # models that have reserved a node
    held: set[str] = set()  # instances that stay until all of a reservation can end
    in_vain: dict[str, int] = {}  # models for which there are no places, with what they would get
    for name in _beyond_minimums(cuts):
        demands[name] = 0
    while True:
        for name, count in counts.items():
            count.wanted = min(demands[name], count.current) if name in in_vain else demands[name]
        shared: dict[str, int] = {}
        for capacity, cut in cuts:
            shared |= _divide({_name(count): (count, slots) for count, slots in cut}, capacity, turns)
        given_up, given_room, found = places.given_up([(counts[name], number) for name, number in shared.items()], held)
        if not found:
            break
        late = [name for name in found if turns[name].is_late and counts[name].deployment.devices > 1]
        for name in sorted({*late} - reserved, key=lambda name: turns[name]):
            reservations = reservations or Reservations(counts, turns, places.placement)
            reserved.add(name)
            reservation = places.reserve(counts[name].deployment, reservations)
            if reservation is None:
                continue
            if reservation.left_s:
                held |= {instance.id for _, instance in reservation.ends}
                turns |= {other: Turn(left_s=turns[other].left_s) for other, _ in reservation.ends}
                continue
            del found[name]
            for other, _ in reservation.ends:
                demands[other] = min(demands[other], counts[other].current) - 1
        in_vain.update(found)
    for name, wanted in in_vain.items():  # it starts as soon as there is a place, and others may make room for it
        if counts[name].wanted == counts[name].current:
            counts[name].wanted = wanted
    return given_up, given_room


def _beyond_minimums(cuts: Sequence[tuple[int, list[tuple[RoleCount, int]]]]) -> Iterator[str]:
    """Yield the models that have no instance, and too few slots for one beside the minimums of others."""
    for capacity, cut in cuts:
        room = capacity - sum(min(count.deployment.min, count.current) * slots for count, slots in cut)
        for count, slots in cut:
            if slots > room and not count.current and not count.deployment.min:
                yield _name(count)


def _name(count: RoleCount) -> str:
    return f"{count.deployment.name} {count.role}"


def _divide(counts: Mapping[str, tuple[RoleCount, int]], capacity: int, turns: Mapping[str, Turn]) -> dict[str, int]:
    """Cut the counts down so that the capacity is enough, fairly. None loses more than one instance at a time.

    Each comes with the slots that an instance takes. Returns the shares that they have in the end.
    """
    demands = {name: count.wanted for name, (count, _) in counts.items()}
    models = {name: count.deployment for name, (count, _) in counts.items()}
    slots_of = {name: slots for name, (_, slots) in counts.items()}
    found = shares(demands, models, capacity, slots_of, turns)
    for name, number in found.items():
        count, _ = counts[name]
        count.wanted = max(number, min(count.wanted, count.current - 1))
    return found


class _Places:
    """The places of one tick for models that get more instances: free ones, and those of models that lose some."""

    def __init__(self, index: Index, placement: Placement, lacking: Container[str]) -> None:
        self._lacking = lacking
        self.placement = placement
        self._nodes, self._shapes = placement.nodes, index.shapes
        emptying = {
            name
            for name, node in placement.nodes.items()
            if node.state == "alive" and (node.returning or any(one.state == "draining" for one in node.instances))
        }
        self._free = self._by_shape({*index.free, *emptying})
        self._beside = self._by_shape(index.free_processors)  # of nodes with accelerators
        self._none_free: dict[tuple[Any, ...], int] = {}  # need → bytes of the smallest model without a place

    def given_up(
        self, shared: Sequence[tuple[RoleCount, int]], held: Container[str]
    ) -> tuple[frozenset[str], frozenset[str], dict[str, int]]:
        """Return the instances whose places others need, and the models for which that makes all of a place.

        The last is the models that get more in vain, with what they get.
        """
        losing = _Losing()
        for count, number in shared:
            if number < count.current:
                losing.add(count, number, held)
        by_shape = self._by_shape(losing.on_nodes)
        chosen: set[str] = set()
        given_room: set[str] = set()
        in_vain: dict[str, int] = {}
        none_given_up: dict[tuple[Any, ...], int] = {}
        for count, _ in shared:
            deployment = count.deployment
            if count.wanted <= count.current or deployment.name not in self._lacking or self._is_free(deployment):
                continue
            ends = None
            if deployment.size_bytes < none_given_up.get(self._need(deployment), math.inf):
                ends = self._least(deployment, losing, by_shape)
            if ends is None:
                _note(none_given_up, self._need(deployment), deployment.size_bytes)
                in_vain[_name(count)] = count.wanted
            else:
                chosen.update(instance.id for instance in ends)
                if len({instance.model for instance in ends}) == len(ends):  # a model loses one at a time
                    given_room.add(deployment.name)
                for name in losing.end(ends):
                    del by_shape[room_shape(self._nodes[name])][name]
        return frozenset(chosen), frozenset(given_room), in_vain

    def reserve(self, deployment: Deployment, reservations: Reservations) -> Reservation | None:
        """Reserve a node for a model of several accelerators."""
        return reservations.reserve(
            deployment,
            suits=lambda node: self._suits(deployment, node),
            can_keep=lambda node: _can_keep(node, deployment),
        )

    def _need(self, deployment: Deployment) -> tuple[Any, ...]:
        """Return what decides, beside the size, on whether there is a place. A larger model never has more of them."""
        return *Claim.of(deployment), deployment.kv_bytes, self.placement.is_too_large(deployment)

    def _by_shape(self, names: Iterable[str]) -> dict[object, dict[str, None]]:
        found: defaultdict[object, dict[str, None]] = defaultdict(dict)
        for name in sorted(names):
            found[room_shape(self._nodes[name])][name] = None
        return found

    def _suitable(self, deployment: Deployment, by_shape: Mapping[object, Iterable[str]]) -> Iterator[Node]:
        """Yield the nodes on which an instance has room while they are empty."""
        for names in by_shape.values():
            node = next((self._nodes[name] for name in names), None)
            if node is not None and self._suits(deployment, node):
                yield from (self._nodes[name] for name in names if _can_keep(self._nodes[name], deployment))

    def _suits(self, deployment: Deployment, node: Node) -> bool:
        """Return whether an instance has room on nodes of a node's shape while they are empty."""
        if not self.placement.is_for(node, deployment):
            return False
        large = is_large_enough(node, deployment) or self.placement.is_too_large(deployment)
        on_device = needs_devices(Claim.of(deployment), self._shapes)
        return large and (not on_device or node.computes_on_device(deployment.device))

    def _is_free(self, deployment: Deployment) -> bool:
        need = self._need(deployment)
        if deployment.size_bytes >= self._none_free.get(need, math.inf):
            return False
        nodes = self._suitable(deployment, self._free)
        if deployment.device == "cpu":
            nodes = chain(nodes, self._suitable(deployment, self._beside))
        if any(self.placement.lacking(node, deployment) <= 0 for node in nodes):
            return True
        _note(self._none_free, need, deployment.size_bytes)
        return False

    def _least(
        self, deployment: Deployment, losing: _Losing, by_shape: Mapping[object, Iterable[str]]
    ) -> list[Instance] | None:
        """Return the instances that make a place on the node where that takes the fewest, or None."""
        best: list[Instance] | None = None
        for node in self._suitable(deployment, by_shape):
            ends = losing.ends(node, deployment, self.placement.lacking(node, deployment))
            if ends is not None and (best is None or len(ends) < len(best)):
                best = ends
                if len(ends) == 1:
                    break
        return best


class _Losing:
    """The instances of models that lose some, of which some end."""

    def __init__(self) -> None:
        self.on_nodes: defaultdict[str, dict[str, str]] = defaultdict(dict)  # node → instance → its count
        self._instances: dict[str, dict[str, Instance]] = {}  # count → those that may end
        self._surplus: dict[str, int] = {}  # count → how many end

    def add(self, count: RoleCount, number: int, held: Container[str]) -> None:
        """Add a model that has so many instances in the end. Those that are ``held`` do not end."""
        name = _name(count)
        self._surplus[name] = count.current - number
        self._instances[name] = {
            one.id: one for one in count.instances if (one.group is None or not number) and one.id not in held
        }
        for instance in self._instances[name].values():
            self.on_nodes[instance.node][instance.id] = name

    def ends(self, node: Node, deployment: Deployment, lacking: int) -> list[Instance] | None:
        """Return the instances that end on a node for so many slots, or None if these are too few."""
        on_device, ends, taken = node.computes_on_device(deployment.device), [], Counter[str]()
        for identity, name in self.on_nodes[node.name].items():
            instance = self._instances[name][identity]
            if lacking <= 0:
                break
            if taken[name] < self._surplus[name] and node.computes_on_device(instance.device) == on_device:
                taken[name] += 1
                lacking -= instance.slots
                ends.append(instance)
        return ends if lacking <= 0 else None

    def end(self, ends: Sequence[Instance]) -> list[str]:
        """Note that these end. Returns the nodes on which no other can."""
        empty = []
        for instance in ends:
            name = self.on_nodes[instance.node][instance.id]
            self._surplus[name] -= 1
            gone = [instance] if self._surplus[name] else list(self._instances[name].values())
            for one in gone:
                del self._instances[name][one.id], self.on_nodes[one.node][one.id]
                if not self.on_nodes[one.node]:
                    del self.on_nodes[one.node]
                    empty.append(one.node)
        return empty


def _can_keep(node: Node, deployment: Deployment) -> bool:
    """Return whether a node's memory is large enough for the weights."""
    return not node.memory_bytes or node.memory_bytes >= deployment.size_bytes


def _note(least: dict[tuple[Any, ...], int], need: tuple[Any, ...], size_bytes: int) -> None:
    least[need] = min(least.get(need, size_bytes), size_bytes)


__all__ = ["share"]
