"""Instances that make room: they hold what another model needs and cannot find, and can move elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple

from ..deployment import Device
from .counting import NO_LOAD
from .index import Index
from .placement import MOST_CANDIDATES, Candidates, Placement, is_large_enough, room_shape
from .state import ClusterState, Deployment, Instance, Node


class _Slots(NamedTuple):
    """What a node has for models that wait: slots that are or become free by themselves, and if instances move."""

    without: int
    most: int


class Moves:
    """The instances that make room for models that wait in this tick.

    For a model that needs a kind of node, instances of models that do not need it move. For one that needs larger
    accelerators, or more of one node, idle ones move to a place that is too small for it.

    A tick may be about a thousand nodes and a hundred models. Within it, places only become fewer. So what was found to
    be none stays none, and is looked at once for all instances that need the same.
    """

    def __init__(self, state: ClusterState, index: Index, placement: Placement) -> None:
        self._nodes, self._deployments, self._loads = state.nodes, state.deployments, state.loads
        self._index, self._placement = index, placement
        self._soon: Counter[str] = Counter()  # node → slots that become free there for models that wait
        self._moved: set[str] = set()
        self._stops = 0  # of those decided in this tick, that were looked at
        self._places: dict[tuple[Any, ...], Candidates] = {}  # where instances go, by what they need
        self._slots: dict[tuple[str, bool], dict[object, dict[str, _Slots]]] = {}  # shape → node → slots
        self._able: dict[tuple[Any, ...], list[tuple[int, str]]] = {}  # need → slots that nodes lack, and their names

    def make_room(
        self, deployment: Deployment, number: int, stopped: Mapping[str, str]
    ) -> Iterator[tuple[Instance, str]]:
        """Yield the instances to end, and why, for so many instances of a model.

        ``stopped`` are ending already: instance → node, in the order of the decisions. What is free where the model
        will start, and what the others will need, goes to no other model in this tick.
        """
        self._note(stopped)
        if not self._index.free or not self._is_particular(deployment):
            return  # nothing can move, or all accelerators are alike
        need = _need(deployment)
        able = self._able.get(need)
        if able is None:
            able = self._able[need] = self._able_nodes(deployment)
        for _ in range(number):
            found = self._least(deployment, able)
            if found is None:
                return
            node, moved = found
            self._soon[node.name] += self._placement.reserve(node, deployment)
            for instance, other in moved:
                self._moved.add(instance.id)
                self._placement.take(other, self._deployments[instance.model])
                kind = "another model needs its kind of device"
                yield instance, kind if deployment.device_kind else f"{deployment.name} needs its place"
            if moved:
                self._able = {need: able}  # for other needs, more may become free there than this model takes

    def _note(self, stopped: Mapping[str, str]) -> None:
        """Note the instances that were ended since the last call: their slots become free."""
        news = list(islice(stopped.items(), self._stops, None))
        self._stops += len(news)
        ended = {node for instance, node in news if instance not in self._moved and node in self._nodes}
        self._moved.update(instance for instance, _ in news)
        if ended:
            self._able.clear()
        for (kind, on_processor), by_shape in self._slots.items():
            for name in ended:
                if (node := self._nodes[name]).state == "alive" and kind in ("", node.device_kind):
                    by_shape.setdefault(room_shape(node), {})[name] = self._slots_of(node, kind, on_processor, {})

    def _is_particular(self, deployment: Deployment) -> bool:
        sizes = sum(count > 0 for count in self._index.sizes.values())
        return bool(deployment.device_kind) or deployment.devices > 1 or sizes > 1

    def _able_nodes(self, deployment: Deployment) -> list[tuple[int, str]]:
        """Return the nodes that may make room, those from which the least has to go first, with what they lack."""
        key = deployment.device_kind, deployment.device == "cpu"
        by_shape = self._slots.get(key)
        if by_shape is None:
            by_shape = self._slots[key] = {}
            places: dict[tuple[str, bool], list[str]] = {}
            for node in self._nodes.values():
                if node.state == "alive" and deployment.device_kind in ("", node.device_kind):
                    by_shape.setdefault(room_shape(node), {})[node.name] = self._slots_of(node, *key, places)
        able = []
        for alike in by_shape.values():
            node = self._nodes[next(iter(alike))]
            if self._placement.is_for(node, deployment) and is_large_enough(node, deployment):
                needed = self._placement.slots(node.name, deployment)
                enough = ((slots.without, name) for name, slots in alike.items() if slots.most >= needed)
                able += [(max(needed - without, 0), name) for without, name in enough]
        return sorted(able)

    def _slots_of(self, node: Node, kind: str, on_processor: bool, places: dict[tuple[str, bool], list[str]]) -> _Slots:
        """Return at least what a node has for models of a kind. ``places`` remembers two where each model can go."""
        on_device = node.devices > 0 and not on_processor
        device: Device = "cpu" if on_processor else "auto"
        free = max(self._placement.free_slots(node.name, device), len(self._placement.left(node)) if on_device else 0)
        without = max(free, 0) + (node.returning if on_device else 0)
        movable = 0
        for one in node.instances:
            if node.computes_on_device(one.device) != on_device:
                continue
            if one.state == "draining" or one.id in self._moved:
                without += one.slots
            elif self._can_go(one, kind):
                found = places.get((one.model, on_device))
                if found is None:
                    found = places[one.model, on_device] = list(islice(self._places_of(one, node, kind), 2))
                movable += one.slots if any(name != node.name for name in found) else 0
        return _Slots(without, without + movable)

    def _least(
        self, deployment: Deployment, able: list[tuple[int, str]]
    ) -> tuple[Node, list[tuple[Instance, str]]] | None:
        """Return the node from which the fewest instances have to go, and where each of them can start.

        It is the best of the first nodes. Those that turn out to be unable are taken from the list.
        """
        found, unable = [], set()
        for lacking, name in able:
            node = self._nodes[name]
            moved = self._moved_from(node, deployment)
            if moved is None:
                if all(one.model != deployment.name for one in node.instances):
                    unable.add(name)  # for any model with this need
                continue
            running = sum(instance.running for instance, _ in moved)
            found.append((len(moved), running, name, moved))
            least = len(moved) == 1 and not running
            if not moved or (lacking and (least or len(found) >= MOST_CANDIDATES)):
                break
        if unable:
            able[:] = [one for one in able if one[1] not in unable]
        if not found:
            return None
        _, _, name, moved = min(found, key=lambda one: one[:3])
        return self._nodes[name], moved

    def _moved_from(self, node: Node, deployment: Deployment) -> list[tuple[Instance, str]] | None:
        """Return which instances make room on a node, and where to: none if it becomes free without. None: too few."""
        on_device = node.computes_on_device(deployment.device)
        alike = [one for one in node.instances if node.computes_on_device(one.device) == on_device]
        moved_away = sum(one.slots for one in alike if one.id in self._moved and one.state != "draining")
        missing = self._placement.lacking(node, deployment) + self._soon[node.name] - moved_away
        moved: list[tuple[Instance, str]] = []
        taken: Counter[tuple[str, bool]] = Counter()  # (node, accelerators) → slots for those that move there
        for instance in sorted(alike, key=lambda one: (one.running, -one.since_s, one.id)):
            if missing <= 0:
                break
            if instance.model == deployment.name or not self._can_go(instance, deployment.device_kind):
                continue
            other = self._elsewhere(instance, node, deployment.device_kind, taken)
            if other is not None:
                going = self._deployments[instance.model]
                taken[other, self._on_device(other, going)] += self._placement.slots(other, going)
                moved.append((instance, other))
                missing -= instance.slots
        return moved if missing <= 0 else None

    def _can_go(self, instance: Instance, kind: str) -> bool:
        """Return whether an instance may make room for a model that needs this kind of node, or, if "", any."""
        moved = self._deployments.get(instance.model)
        if moved is None or instance.state != "ready" or instance.group is not None or instance.id in self._moved:
            return False
        if not instance.full or (moved.device_kind if kind else instance.running):
            return False
        load = self._loads.get(instance.model, NO_LOAD)  # what an instance prefills, counts where it is decoded
        return instance.role != "prefill" or not (load.waiting or load.running)

    def _elsewhere(
        self, instance: Instance, node: Node, kind: str, taken: Mapping[tuple[str, bool], int]
    ) -> str | None:
        """Return another node where an instance can start, on a free place that is none for the model that waits."""
        moved, placement = self._deployments[instance.model], self._placement
        for name in self._places_of(instance, node, kind):
            if name == node.name:
                continue
            free = placement.free_slots(name, moved.device) - taken.get((name, self._on_device(name, moved)), 0)
            if free >= placement.slots(name, moved) and self._has_room(name, moved):
                return name
        return None

    def _places_of(self, instance: Instance, node: Node, kind: str) -> Candidates:
        """Return the nodes with a free place for an instance of this node, perhaps this node among them.

        Without a kind, it goes on computing on accelerators, or on a processor.
        """
        moved = self._deployments[instance.model]
        on_device = None if kind else node.computes_on_device(moved.device)
        key = *_need(moved), kind, on_device
        if key not in self._places:

            def suits(name: str) -> bool:
                other = self._nodes[name]
                same = kind != other.device_kind if kind else other.computes_on_device(moved.device) == on_device
                return same and self._has_room(name, moved)

            self._places[key] = Candidates(filter(suits, self._free_for(moved)), suits)
        return self._places[key]

    def _free_for(self, moved: Deployment) -> Iterator[str]:
        """Yield the nodes on which a slot is free, without most of those whose accelerators have too little room."""
        if moved.device == "cpu":
            yield from chain(self._index.free, sorted(self._index.free_processors))
            return
        needed = self._placement.least_room(moved)
        yield from (name for name in self._index.free if self._placement.room(name, moved.devices) >= needed)

    def _has_room(self, name: str, moved: Deployment) -> bool:
        node = self._nodes[name]
        room = not node.memory_bytes or node.memory_bytes >= moved.size_bytes
        return room and self._placement.can_hold(name, moved)

    def _on_device(self, name: str, deployment: Deployment) -> bool:
        return self._nodes[name].computes_on_device(deployment.device)


def _need(deployment: Deployment) -> tuple[Any, ...]:
    """Return what decides on which nodes a deployment has room, for two that ask for the same."""
    kind = deployment.device_kind, deployment.device, deployment.devices
    return *kind, deployment.size_bytes, deployment.kv_bytes


__all__ = ["Moves"]
