"""Instances that make room: they hold what another model needs and cannot find, and can move elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from .index import Index
from .placement import Placement, is_large_enough
from .state import Deployment, Instance, Node


class Moves:
    """The instances that make room for models that wait in this tick.

    For a model that needs a kind of node, instances of models that do not need it move. For one that needs larger
    accelerators, or more of one node, idle ones move to a place that is too small for it.
    """

    def __init__(
        self, nodes: Mapping[str, Node], index: Index, deployments: Mapping[str, Deployment], placement: Placement
    ) -> None:
        self._nodes, self._index, self._deployments, self._placement = nodes, index, deployments, placement
        self._soon: Counter[str] = Counter()  # node → slots that become free there for models that wait
        self._moved: set[str] = set()

    def make_room(
        self, deployment: Deployment, number: int, stopped: Collection[str]
    ) -> Iterator[tuple[Instance, str]]:
        """Yield the instances to end, and why, for so many instances of a model. ``stopped`` are ending already.

        What is free where it will start, and what the others will need, goes to no other model in this tick.
        """
        self._moved.update(stopped)
        if not self._index.free or not self._is_particular(deployment):
            return  # nothing can move, or all accelerators are alike
        for _ in range(number):
            found = self._least(deployment)
            if found is None:
                return
            node, moved = found
            self._soon[node.name] += self._placement.reserve(node, deployment)
            for instance, other in moved:
                self._moved.add(instance.id)
                self._placement.take(other, self._deployments[instance.model])
                kind = "another model needs its kind of device"
                yield instance, kind if deployment.device_kind else f"{deployment.name} needs its place"

    def _is_particular(self, deployment: Deployment) -> bool:
        sizes = sum(count > 0 for count in self._index.sizes.values())
        return bool(deployment.device_kind) or deployment.devices > 1 or sizes > 1

    def _least(self, deployment: Deployment) -> tuple[Node, list[tuple[Instance, str]]] | None:
        """Return the node from which the fewest instances have to go, and where each of them can start."""
        found = []
        for node in self._nodes.values():
            if node.state == "alive" and self._placement.is_for(node, deployment) and is_large_enough(node, deployment):
                moved = self._moved_from(node, deployment)
                if moved is not None:
                    running = sum(instance.running for instance, _ in moved)
                    found.append((len(moved), running, node.name, moved))
        if not found:
            return None
        _, _, name, moved = min(found, key=lambda one: one[:3])
        return self._nodes[name], moved

    def _moved_from(self, node: Node, deployment: Deployment) -> list[tuple[Instance, str]] | None:
        """Return which instances make room on a node, and where to: none if it becomes free without. None: too few."""
        on_device = node.computes_on_device(deployment.device)
        alike = [one for one in node.instances if node.computes_on_device(one.device) == on_device]
        ending = sum(one.slots for one in alike if one.state == "draining" or one.id in self._moved)
        missing = self._placement.slots(node.name, deployment) + self._soon[node.name] - ending
        missing -= self._placement.usable_slots(node, deployment) + (node.returning if on_device else 0)
        moved: list[tuple[Instance, str]] = []
        taken: Counter[tuple[str, bool]] = Counter()  # (node, accelerators) → slots for those that move there
        for instance in sorted(alike, key=lambda one: (one.running, -one.since_s, one.id)):
            if missing <= 0:
                break
            other = self._elsewhere(instance, node, deployment, taken) if self._can_go(instance, deployment) else None
            if other is not None:
                taken[self._pool(other, instance)] += self._slots(other, instance)
                moved.append((instance, other))
                missing -= instance.slots
        return moved if missing <= 0 else None

    def _can_go(self, instance: Instance, deployment: Deployment) -> bool:
        moved = self._deployments.get(instance.model)
        if moved is None or instance.state != "ready" or instance.group is not None or instance.id in self._moved:
            return False
        if instance.model == deployment.name or not instance.full:
            return False
        return not moved.device_kind if deployment.device_kind else not instance.running

    def _elsewhere(
        self, instance: Instance, node: Node, deployment: Deployment, taken: Counter[tuple[str, bool]]
    ) -> str | None:
        """Return another node where an instance can start, on a free place that does not do for the deployment."""
        moved, placement = self._deployments[instance.model], self._placement
        names = [*self._index.free, *self._index.free_processors] if moved.device == "cpu" else self._index.free
        for name in names:
            other = self._nodes[name]
            if name == node.name or (deployment.device_kind and deployment.device_kind == other.device_kind):
                continue
            on_device = other.computes_on_device(moved.device)
            if not deployment.device_kind and on_device != node.computes_on_device(moved.device):
                continue  # it would compute on a processor
            free = placement.free_slots(name, moved.device) - taken[name, on_device]
            room = not other.memory_bytes or other.memory_bytes >= moved.size_bytes
            if free >= placement.slots(name, moved) and room and placement.can_hold(name, moved):
                return name
        return None

    def _pool(self, name: str, instance: Instance) -> tuple[str, bool]:
        return name, self._nodes[name].computes_on_device(self._deployments[instance.model].device)

    def _slots(self, name: str, instance: Instance) -> int:
        return self._placement.slots(name, self._deployments[instance.model])


__all__ = ["Moves"]
