"""What models take slots of, the bounds on what they can have together, and what an autoscaler is asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..deployment import Device
from .state import Deployment, Node, RequestNodes

Shape = tuple[str, int]  # kind, accelerators of a node
Shapes = Mapping[Shape, int]  # how many such nodes there are


def shape_of(node: Node) -> Shape:
    """Return a node's kind, and how many of its accelerators can be used. -1: it has some, but none answers."""
    return node.device_kind, (node.slots or -1) if node.devices else 0


class Claim(NamedTuple):
    """What an instance takes: accelerators, or the processor of a node, of one kind of node if it is named."""

    kind: str
    device: Device
    devices: int

    @classmethod
    def of(cls, deployment: Deployment) -> Claim:
        return cls(deployment.device_kind, deployment.device, deployment.devices)


@dataclass(frozen=True)
class Bound:
    """The slots that the instances with some claims can take together, and how many each takes.

    ``nodes`` have them. A node without ``least_devices`` accelerators adds nothing. ``multiple``: slots of a node count
    only in such multiples, because an instance takes all of its accelerators from one node.
    """

    slots_of: Mapping[Claim, int]
    capacity: int
    nodes: int
    of_all_kinds: bool
    least_devices: int = 0
    processors: bool = False  # that of each node, also beside accelerators
    accelerators: bool = True

    def slots(self, node: Node) -> int:
        """Return how many of the slots a node adds."""
        return self._slots(shape_of(node)[1])

    def _slots(self, devices: int) -> int:
        return _slots(devices, self.least_devices, accelerators=self.accelerators, processors=self.processors)


@dataclass
class Shortage:
    """The slots that the loads could use beyond a bound, and those of them that they cannot do without."""

    bound: Bound
    useful: int
    missing: int


def bounds(shapes: Shapes, claims: Collection[Claim]) -> tuple[Bound, ...]:
    """Return the bounds that hold for these claims: those of each kind of node first, and of few claims before many."""
    return _bounds(frozenset(item for item in shapes.items() if item[1]), frozenset(claims))


@lru_cache(64)  # most ticks have the same shapes and claims as the last one
def _bounds(shapes: frozenset[tuple[Shape, int]], claims: frozenset[Claim]) -> tuple[Bound, ...]:
    return tuple(_each_bound(dict(shapes), claims))


def _each_bound(shapes: Shapes, claims: Collection[Claim]) -> Iterator[Bound]:
    for kind in (*sorted({claim.kind for claim in claims} - {""}), ""):
        of_kind = [claim for claim in claims if kind in ("", claim.kind)]
        sizes: dict[int, int] = {}
        for (kind_of_node, devices), count in shapes.items():
            if kind in ("", kind_of_node):
                sizes[devices] = sizes.get(devices, 0) + count
        on_devices = {claim for claim in of_kind if needs_devices(claim, shapes)}
        without = {claim for claim in of_kind if claim.device == "cpu"}
        for devices in sorted({claim.devices for claim in on_devices if claim.devices > 1}, reverse=True):
            yield _bound({claim for claim in on_devices if claim.devices == devices}, shapes, sizes, kind, devices)
        if on_devices:
            yield _bound(on_devices, shapes, sizes, kind, 1)
        if without:
            yield _bound(without, shapes, sizes, kind, processors=True, accelerators=False)
        either = {claim for claim in of_kind if claim not in without}
        if either - on_devices:
            yield _bound(either, shapes, sizes, kind)
        if without and either:
            yield _bound(set(of_kind), shapes, sizes, kind, processors=True)


def _bound(
    claims: set[Claim],
    shapes: Shapes,
    sizes: Mapping[int, int],
    kind: str,
    least_devices: int = 0,
    *,
    processors: bool = False,
    accelerators: bool = True,
) -> Bound:
    slots = {
        devices: _slots(devices, least_devices, accelerators=accelerators, processors=processors) for devices in sizes
    }
    return Bound(
        {claim: claim.devices if _takes_devices(claim, shapes) else 1 for claim in sorted(claims)},
        sum(slots[devices] * count for devices, count in sizes.items()),
        sum(count for devices, count in sizes.items() if slots[devices]),
        not kind,
        least_devices,
        processors,
        accelerators,
    )


def _slots(devices: int, least_devices: int, *, accelerators: bool, processors: bool) -> int:
    if least_devices:
        return max(devices, 0) // least_devices * least_devices
    on_processor = 1 if processors or not devices else 0
    return (max(devices, 0) if accelerators else 0) + on_processor


def _takes_devices(claim: Claim, shapes: Shapes) -> bool:
    """Return whether an instance takes accelerators wherever there are any."""
    return claim.device == "cuda" or (
        claim.device != "cpu"
        and any(devices for (kind, devices), count in shapes.items() if count and claim.kind in ("", kind))
    )


def needs_devices(claim: Claim, shapes: Shapes) -> bool:
    """Return whether no processor will do: where there are accelerators, several are not replaced by one processor."""
    return claim.device == "cuda" or (claim.devices > 1 and _takes_devices(claim, shapes))


def request(shortages: Collection[Shortage], nodes: Collection[Node]) -> RequestNodes:
    """Return what to ask an autoscaler for, where these nodes are there: some may drain, which are nodes to Ray, too.

    The nodes that come are taken for such as add to the bound already. If none does, each has what one instance needs.
    """
    more, devices = 0, list[int]()
    for shortage in sorted(shortages, key=lambda shortage: -shortage.bound.least_devices):
        bound, missing = shortage.bound, max(shortage.missing, 0)
        there, slots = (bound.nodes, bound.capacity) if bound.nodes else (1, max(bound.slots_of.values()))
        count = -(-missing * there // slots)
        more = max(more, count)
        devices += [bound.least_devices] * (count - len(devices) if bound.least_devices else 0)
    if not more:
        return RequestNodes(0)
    if devices:
        devices += [node.devices for node in nodes if node.devices]
    return RequestNodes(len(nodes) + more, tuple(sorted(devices, reverse=True)))
