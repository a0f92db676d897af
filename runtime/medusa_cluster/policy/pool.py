"""The global parameter pool: the cluster holds at least one complete copy of each deployed model in host memory.

BlitzScale §5.3. The pool's copies are pinned. All other copies are the nodes' caches, from which the least recently
used ones are evicted first. A copy of an older version does not count. If the deployed models do not fit into the
cluster's memory, nothing is pinned: all memory is then a cache, which keeps what was used last, and the other models
start from the store. Only free memory is filled in that case.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .index import Index
from .state import Copy, Deployment, Drop, Node, Pin


@dataclass(frozen=True, slots=True)
class Restoration:
    """The needs of the pool: nodes that must fetch a copy, and changes to the copies that are there."""

    fetches: Mapping[str, str]  # URL → node
    changes: tuple[Pin | Drop, ...]
    waiting: frozenset[str] = frozenset()  # URLs for which no node has room


def is_current(copy: Copy, deployment: Deployment) -> bool:
    """Return whether a copy is, or will be, of the deployment's version, as far as both are known."""
    return not copy.version or not deployment.version or copy.version == deployment.version


def sources(index: Index, nodes: Mapping[str, Node], deployment: Deployment) -> list[Node]:
    """Return the nodes from which the model can be read, including those that drain or still receive it."""
    return [
        nodes[name]
        for name, copy in index.holders.get(deployment.url, {}).items()
        if copy.layers is None and is_current(copy, deployment)
    ]


def restore(
    index: Index, nodes: Mapping[str, Node], by_url: Mapping[str, Deployment], urls: Iterable[str] | None = None
) -> Restoration:
    """Return what brings the pool back to one current, pinned copy of each deployed model, spread evenly by size.

    ``urls`` are the models to look at. None: look at all of them, and also at how evenly they are spread.
    """
    looked_at = sorted({*by_url, *index.holders} if urls is None else urls)
    changes: list[Pin | Drop] = []
    missing: list[Deployment] = []
    for url in looked_at:
        if url not in by_url:
            continue
        deployment = by_url[url]
        if index.is_short:
            holders = index.holders.get(url, {})
            changes += [Pin(name, url, pinned=False) for name, copy in holders.items() if copy.pinned]
            if urls is None and not holders:
                missing.append(deployment)
            continue
        pinned = [
            name
            for name, copy in index.holders.get(url, {}).items()
            if copy.pinned and name in index.pinned_bytes and is_current(copy, deployment) and copy.layers is None
        ]
        if len(pinned) > 1:
            changes += _surplus(index, nodes, url, pinned)
        elif not pinned:
            adopted = _adopt(index, nodes, deployment)
            if adopted:
                changes.append(Pin(adopted, url))
            else:
                missing.append(deployment)
    changes += _outdated(index, nodes, by_url, looked_at)
    fetches = spread(index, nodes, missing, evicts=not index.is_short)
    waiting = frozenset(deployment.url for deployment in missing if deployment.url not in fetches)
    if urls is None and not fetches and not changes and not index.is_short:
        for url, name in _rebalance(index, nodes, by_url).items():
            if name in index.holders[url]:
                changes.append(Pin(name, url))
            else:
                fetches[url] = name
    return Restoration(fetches, tuple(changes), waiting)


def restore_touched(index: Index, nodes: Mapping[str, Node], by_url: Mapping[str, Deployment]) -> Restoration:
    """Call ``restore`` for the models that may need it since the last call, and note in ``index`` which are left."""
    looked_at = None if index.joined or index.touched is None else index.touched
    if looked_at is not None and index.roomier:
        looked_at = looked_at | index.waiting
    found = restore(index, nodes, by_url, looked_at)
    index.touched = {*found.fetches, *(change.url for change in found.changes)}
    index.joined &= bool(index.touched)
    index.waiting = found.waiting if looked_at is None or index.roomier else index.waiting | found.waiting
    index.roomier = False
    return found


def spread(
    index: Index, nodes: Mapping[str, Node], deployments: Iterable[Deployment], *, evicts: bool = True
) -> dict[str, str]:
    """Choose a node for each model, the largest model first: the node that the pool fills least. Returns URL → node.

    A node with a link twice as fast takes twice as much, because other nodes get a copy from it sooner. A model that
    fits nowhere is left out. With ``evicts``, the room that caches take counts as free.
    """
    wanted = sorted(deployments, key=lambda deployment: (-deployment.size_bytes, deployment.url))
    if not wanted:
        return {}
    largest = wanted[0].size_bytes  # compared as with it, so that the first goes where a copy weighs least
    heap = [(_filled(nodes[name], pinned + largest), name, pinned) for name, pinned in index.pinned_bytes.items()]
    heapq.heapify(heap)
    chosen: dict[str, str] = {}
    rooms: dict[str, int] = {}  # as the models that were placed leave them
    too_large = math.inf
    for deployment in wanted:
        if deployment.size_bytes >= too_large:
            continue
        set_aside = []
        while heap:
            entry = heapq.heappop(heap)
            _, name, pinned = entry
            if name not in rooms:
                rooms[name] = room(nodes[name]) if evicts else nodes[name].free_bytes
            if rooms[name] >= deployment.size_bytes:
                chosen[deployment.url] = name
                rooms[name] -= deployment.size_bytes
                pinned += max(deployment.size_bytes, 1)
                heapq.heappush(heap, (_filled(nodes[name], pinned + largest), name, pinned))
                break
            set_aside.append(entry)
        else:
            too_large = deployment.size_bytes
        for entry in set_aside:
            heapq.heappush(heap, entry)
    return chosen


def evict(
    node: Node, needed_bytes: int, by_url: Mapping[str, Deployment], *, pinned: bool = False
) -> list[Drop] | None:
    """Return the copies to drop so that ``needed_bytes`` are free, or None if that is impossible.

    Copies that an instance uses are never dropped. Models that are no longer deployed go first, then the least recently
    used ones. With ``pinned``, copies of the pool may go too, after all others.
    """
    free = node.free_bytes
    drops: list[Drop] = []
    in_use = _in_use(node)
    for copy in sorted(node.copies, key=lambda copy: (copy.pinned, copy.url in by_url, copy.used_at_s, copy.url)):
        if free >= needed_bytes:
            break
        if not copy.is_complete or (copy.pinned and not pinned):
            continue
        if copy.url in in_use or (copy.url in by_url and by_url[copy.url].name in in_use):
            continue
        reason = "the least recently used of the pool, for an instance" if copy.pinned else "least recently used"
        drops.append(Drop(node.name, copy.url, reason))
        free += copy.total_bytes
    return drops if free >= needed_bytes else None


def room(node: Node, by_url: Mapping[str, Deployment] | None = None) -> int:
    """Return the bytes that are free or would be after evicting caches; with ``by_url`` not those that are in use."""
    in_use = _in_use(node) if by_url is not None else ()
    caches = (copy for copy in node.copies if not copy.pinned and copy.is_complete)
    return node.free_bytes + sum(
        copy.total_bytes
        for copy in caches
        if copy.url not in in_use and (by_url is None or copy.url not in by_url or by_url[copy.url].name not in in_use)
    )


def _filled(node: Node, pinned: int) -> float:
    """Return how full the pool makes a node: the part of its memory, for each byte a second of its link."""
    return pinned / node.memory_bytes / node.link_bytes_per_s if node.memory_bytes else float("inf")


def _adopt(index: Index, nodes: Mapping[str, Node], deployment: Deployment) -> str | None:
    """Return the node whose cache has the most of the model, or None if there is none."""
    found = [
        (-copy.fetched_bytes, _filled(nodes[name], index.pinned_bytes[name]), name)
        for name, copy in index.holders.get(deployment.url, {}).items()
        if name in index.pinned_bytes and copy.layers is None and copy.place == "host" and is_current(copy, deployment)
    ]
    return min(found)[2] if found else None


def _surplus(index: Index, nodes: Mapping[str, Node], url: str, pinned: list[str]) -> list[Pin]:
    """Unpin all but one of several complete copies. The one on the node that the pool fills least stays."""
    complete = [name for name in pinned if index.holders[url][name].is_complete]
    if not complete:
        return []
    kept = min(complete, key=lambda name: (_filled(nodes[name], index.pinned_bytes[name]), name))
    return [Pin(name, url, pinned=False) for name in complete if name != kept]


def _outdated(
    index: Index, nodes: Mapping[str, Node], by_url: Mapping[str, Deployment], urls: Iterable[str]
) -> list[Pin | Drop]:
    """Drop copies of older versions that no instance uses, and unpin copies of models that are no longer deployed."""
    changes: list[Pin | Drop] = []
    for url in urls:
        deployment = by_url.get(url)
        for name, copy in index.holders.get(url, {}).items():
            if deployment is None:
                if copy.pinned:
                    changes.append(Pin(name, url, pinned=False))
            elif not is_current(copy, deployment) and deployment.name not in _in_use(nodes[name]):
                changes.append(Drop(name, url, f"version {copy.version}, not {deployment.version}"))
    return changes


def _in_use(node: Node) -> set[str]:
    """Return the names of the models that have instances on a node, and the URLs of what these were started with."""
    return {found for instance in node.instances for found in (instance.model, instance.url)}


def _rebalance(index: Index, nodes: Mapping[str, Node], by_url: Mapping[str, Deployment]) -> dict[str, str]:
    """Move one copy from the fullest to the emptiest node, if that makes the two more alike. Returns URL → node."""
    pinned = {name: size for name, size in index.pinned_bytes.items() if nodes[name].memory_bytes}
    if len(pinned) < 2 or any(copy.pinned for copy in index.arriving.values()):
        return {}
    full = nodes[max(pinned, key=lambda name: _filled(nodes[name], pinned[name]))]
    empty = nodes[min(pinned, key=lambda name: _filled(nodes[name], pinned[name] + 1))]
    space = room(empty)
    movable = [
        copy
        for copy in full.copies
        if copy.pinned
        and copy.url in by_url
        and copy.is_complete
        and copy.total_bytes <= space
        and _filled(empty, pinned[empty.name] + copy.total_bytes) <= _filled(full, pinned[full.name] - copy.total_bytes)
    ]
    return {max(movable, key=lambda copy: (copy.total_bytes, copy.url)).url: empty.name} if movable else {}
