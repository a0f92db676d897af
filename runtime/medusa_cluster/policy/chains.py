"""Plans for multicasts, which say from which node each node reads a model (BlitzScale §5.1, Algorithm 1).

A chain is a row of groups. Each group reads from the group before it while that one still receives. So a chain of any
length takes hardly longer than its slowest link. The nodes of a group share a fast link.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from math import inf

from .state import Node

_FALLBACKS = 4  # how many other nodes a target may try before the chain's head and the store
Group = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Groups of nodes' names, in the order in which the bytes pass them. The first is the source, () for the store."""

    groups: tuple[Group, ...]
    bytes_per_s: float  # of its slowest link

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups[1:] for name in group)

    def routes(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield each target, in the order of the chain, with its sources, best first.

        The sources are the node before it in its own lane, then those in the other lanes, then the nodes before these.
        They are all earlier in the chain, so no two nodes ever wait for each other. In a long chain they are the
        nearest ones and the head. The store is implied at the end.
        """
        for position in range(1, len(self.groups)):
            for lane, name in enumerate(self.groups[position]):
                yield name, self._before(position, lane)

    def _before(self, position: int, lane: int) -> tuple[str, ...]:
        found: Group = ()
        while position > 1 and len(found) < _FALLBACKS:
            position -= 1
            found += _rotated(self.groups[position], lane)
        return found + _rotated(self.groups[0], lane)


def plan(sources: Iterable[Node], targets: Iterable[Node], *, arriving: Set[str] = frozenset()) -> tuple[Chain, ...]:
    """Plan chains that bring a model from the sources to the targets.

    Sources that send keys and values or activations are left out, and so are targets that receive them. ``arriving``
    are sources that still receive the model themselves; they come after those that have it. Without any source, one
    chain begins at the store, which sends the model once.
    """
    heads = _groups(node for node in sources if node.state != "lost" and not node.serves_out)
    head_nodes = {node.name for group in heads for node in group}
    receivers = (
        node for node in targets if node.state == "alive" and not node.serves_in and node.name not in head_nodes
    )
    waiting = _UnassignedGroups(_groups(receivers))
    chains: list[list[list[Node]]] = [[group] for group in heads] or [[[]]]
    rates = [_bandwidth(chain[0]) for chain in chains]
    still_arriving = [any(node.name in arriving for node in chain[0]) for chain in chains]
    tails = [(-rates[number], still_arriving[number], 1, number) for number in range(len(chains))]
    heapq.heapify(tails)
    while tails and waiting:
        _, _, size, number = heapq.heappop(tails)
        tail = chains[number][-1]
        group = waiting.take(tail[-1].leaf if tail else None)
        chains[number].append(group)
        rates[number] = min(rates[number], _bandwidth(group))
        heapq.heappush(tails, (-rates[number], still_arriving[number], size + 1, number))
    return tuple(
        Chain(tuple(tuple(node.name for node in group) for group in chain), rate)
        for chain, rate in zip(chains, rates, strict=True)
        if len(chain) > 1
    )


def _rotated(group: Group, lane: int) -> Group:
    if len(group) < 2:
        return group
    first = lane % len(group)
    return group[first:] + group[:first]


def _groups(nodes: Iterable[Node]) -> list[list[Node]]:
    """Group nodes that share a fast link. The fastest group, and in it the fastest node, comes first."""
    groups: dict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        groups[f"domain {node.fast_domain}" if node.fast_domain else f"node {node.name}"].append(node)
    for group in groups.values():
        group.sort(key=lambda node: (-node.link_bytes_per_s, node.name))
    return sorted(groups.values(), key=lambda group: (-_bandwidth(group), group[0].name))


def _bandwidth(group: Sequence[Node]) -> float:
    if len(group) == 1:
        return group[0].link_bytes_per_s
    return sum(node.link_bytes_per_s for node in group) if group else inf


class _UnassignedGroups:
    """The groups that no chain has taken yet, the fastest first, by leaf and over all leaves."""

    def __init__(self, groups: Sequence[list[Node]]) -> None:
        self._all = list(reversed(groups))  # the fastest at the end, where it is cheap to take
        self._by_leaf: dict[str, list[list[Node]]] = defaultdict(list)
        for group in self._all:
            self._by_leaf[group[0].leaf].append(group)
        self._taken: set[str] = set()
        self._left = len(groups)

    def __bool__(self) -> bool:
        return self._left > 0

    def take(self, leaf: str | None) -> list[Node]:
        near = self._first(self._by_leaf.get(leaf, [])) if leaf is not None else None
        group = near or self._first(self._all)
        assert group is not None
        self._taken.add(group[0].name)
        self._left -= 1
        return group

    def _first(self, groups: list[list[Node]]) -> list[Node] | None:
        while groups:
            group = groups.pop()
            if group[0].name not in self._taken:
                return group
        return None
