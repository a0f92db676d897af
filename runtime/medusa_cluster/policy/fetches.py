"""The fetches of one tick: sources for each node that needs a model, in new chains and in those that lost a node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .chains import Chain, plan
from .index import Index
from .pool import evict, is_current, sources
from .state import Copy, Deployment, Drop, Fetch, Layers, Node, Pace


@dataclass
class Fetches:
    """The targets of one tick, collected by model."""

    nodes: Mapping[str, Node]
    index: Index
    by_url: Mapping[str, Deployment]
    from_peers: bool = True
    forwarding: bool = True  # receivers send on what they have; else every target reads from a complete copy
    chains: dict[str, tuple[Chain, ...]] = field(default_factory=dict)
    _targets: defaultdict[str, dict[str, Fetch]] = field(default_factory=lambda: defaultdict(dict))

    def request(
        self, node: str, url: str, *, pin: bool = False, layers: Layers | None = None, reason: str = ""
    ) -> None:
        """Ask for a model on a node. If it is asked for twice, it is fetched once, with the layers of both."""
        found = self._targets[url].get(node)
        if found is not None:
            both = (found.layers, layers) if found.layers is not None and layers is not None else None
            layers = (min(both[0][0], both[1][0]), max(both[0][1], both[1][1])) if both is not None else None
            pin, reason = pin or found.pin, found.reason
        self._targets[url][node] = Fetch(node, url, (), pin, layers, reason)

    def target(self, url: str) -> str | None:
        """Return a node that was asked to fetch the model in this tick."""
        return next(iter(self._targets.get(url, ())), None)

    def decide(self) -> list[Drop | Fetch]:
        """Return the fetches with their sources, each after the drops that make room for it."""
        feeding = self._feeding()
        decisions: list[Drop | Fetch] = []
        for url, wanted in self._targets.items():
            for fetch in self._routed(self.by_url[url], wanted, feeding):
                decisions += self._room_for(fetch)
                decisions.append(fetch)
        return decisions

    def repair(self) -> list[Fetch]:
        """Return new sources for arriving copies that have lost one: those that are left, else others."""
        repaired = []
        for (name, url), copy in self.index.arriving.items():
            if not copy.sources:
                continue
            deployment = self.by_url.get(url)
            left = tuple(source for source in copy.sources if self._serves(source, copy))
            if left == copy.sources or copy.fetched_bytes >= copy.total_bytes > 0:
                continue
            if not left and deployment is not None:
                left = tuple(
                    node.name
                    for node in sources(self.index, self.nodes, deployment)
                    if self.index.holders[url][node.name].is_complete and node.name != name
                )[:2]
            repaired.append(Fetch(name, url, left, copy.pinned, copy.layers, "a source is gone"))
        return repaired

    def paces(self, fraction: float) -> list[Pace]:
        """Return the changes of limits for nodes that send weights, for those that do so beside serving traffic.

        A paced stream leaves the link's queue empty, so serving traffic goes first, without privileges.
        """
        limits: dict[str, float] = {}
        for name in self._feeding():
            node = self.nodes.get(name)
            if node is None or node.state == "lost":
                continue
            if node.serves_out or any(instance.running for instance in node.instances):
                limits[name] = node.link_bytes_per_s * fraction
        changed = [Pace(name, limit) for name, limit in limits.items() if self.nodes[name].pace_bytes_per_s != limit]
        return changed + [Pace(name, None) for name in sorted(self.index.paced - limits.keys())]

    def _routed(self, deployment: Deployment, wanted: dict[str, Fetch], feeding: dict[str, int]) -> list[Fetch]:
        url = deployment.url
        origins = sources(self.index, self.nodes, deployment) if self.from_peers else []
        origins = [node for node in origins if node.name not in wanted]
        arriving = {node.name for node in origins if not self.index.holders[url][node.name].is_complete}
        if not self.forwarding:
            return self._star(wanted, [node for node in origins if node.name not in arriving], feeding)
        whole = [fetch for fetch in wanted.values() if fetch.layers is None]
        idle = [node for node in origins if not feeding.get(node.name)]
        busy = sorted(
            (node for node in origins if not node.serves_out), key=lambda node: (feeding.get(node.name, 0), node.name)
        )
        chains = plan(idle, (self.nodes[fetch.node] for fetch in whole), arriving=arriving)
        if busy and all(chain.groups[0] == () for chain in chains):
            chains = plan(busy[:1], (self.nodes[fetch.node] for fetch in whole), arriving=arriving)
        self.chains[url] = chains
        routed = []
        for name, before in (route for chain in chains for route in chain.routes()):
            if before and before[-1] in arriving:  # the tail of an older chain: add the nodes from which it reads
                copy = self.index.holders[url][before[-1]]
                before += tuple(name for name in copy.sources if name not in before and self._serves(name, copy))
            routed.append(replace(wanted[name], sources=before))
            if before:
                feeding[before[0]] = feeding.get(before[0], 0) + 1
        placed = {fetch.node for fetch in routed}
        missed = {name: fetch for name, fetch in wanted.items() if name not in placed}
        return routed + self._star(missed, [node for node in busy if node.name not in arriving], feeding)

    def _star(self, wanted: Mapping[str, Fetch], complete: list[Node], feeding: dict[str, int]) -> list[Fetch]:
        """Let each target read from the complete copy that sends to the fewest others, else from the store."""
        routed = []
        for fetch in wanted.values():
            ordered = sorted(complete, key=lambda node: (feeding.get(node.name, 0), -node.link_bytes_per_s, node.name))
            names = tuple(node.name for node in ordered[:2])
            if names:
                feeding[names[0]] = feeding.get(names[0], 0) + 1
            routed.append(replace(fetch, sources=names))
        return routed

    def _feeding(self) -> dict[str, int]:
        """Return how many fetches read from each node now."""
        counts: dict[str, int] = {}
        for copy in self.index.arriving.values():
            if copy.sources and copy.fetched_bytes < copy.total_bytes:
                counts[copy.sources[0]] = counts.get(copy.sources[0], 0) + 1
        return counts

    def _serves(self, source: str, wanted: Copy) -> bool:
        """Return whether a node is still a source, that is, it lives and has or receives the same version."""
        copy = self.index.holders.get(wanted.url, {}).get(source)
        if copy is None:
            return False
        return not wanted.version or not copy.version or copy.version == wanted.version

    def _room_for(self, fetch: Fetch) -> list[Drop]:
        node, deployment = self.nodes[fetch.node], self.by_url[fetch.url]
        if not node.memory_bytes or not deployment.size_bytes:
            return []
        starts = not fetch.pin and fetch.layers is None  # a group's worker starts only where no pinned copy has to go
        return evict(node, deployment.size_bytes, self.by_url, pinned=starts) or []


def is_target(index: Index, deployment: Deployment, node: str) -> bool:
    """Return whether a node has the whole model, or receives it."""
    copy = index.holders.get(deployment.url, {}).get(node)
    return copy is not None and copy.layers is None and is_current(copy, deployment)
