"""The pairs of live scaling: new instances that load, and loaded ones that they relieve (BlitzScale §5.2).

The two are paired only where it is needed: where the first tokens of what waits, and of what comes while the weights
arrive, might else be later than the TTFT SLO. Without an SLO, or while too little is known to predict that, they are
paired. Whether it is needed is predicted with caution: the load may grow to what is being started for, and prompts
that are longer than others, or come together, wait longer than is predicted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from medusa_runtime.state.stage_times import WorkerRates

from .chains import Chain
from .counting import NO_LOAD, RoleCount
from .index import Index
from .scaling import prefill_rate
from .state import ClusterState, Instance, Load, Processor, Role, StartInstance

_SURE = 0.7  # of the SLO. With 0.7, a third of the simulated pairs are spared, and 0.1 % more first tokens are late


def live_pairs(chains: Sequence[Chain], loaded: Sequence[str], starting: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Pair what starts on the last such target of each chain with instances that it relieves, each with another one.

    ``loaded`` are the instances' ids, the most loaded first. ``starting``: node → ids of what starts there, which may
    be several. The first ones of all chains come before the second ones. Returns new id → loaded id.
    """
    ordered = sorted(chains, key=lambda chain: -chain.bytes_per_s)
    ends = [next((name for name in reversed(chain.targets) if name in starting), None) for chain in ordered]
    rows = zip_longest(*(starting[name] for name in ends if name is not None))
    return dict(zip([one for row in rows for one in row if one is not None], loaded, strict=False))


def longest_wait_s(load: Load, rate: float, later_rate: float, until_s: float) -> float:
    """Return how long a prompt waits at most for its prefill: one that waits now, or comes in the next ``until_s``.

    Prompts are served first come, first served: ``rate`` tokens a second now, and ``later_rate`` after ``until_s``.
    """
    waiting, arriving = load.unanswered_tokens, load.tokens_per_s

    def wait_s(at_s: float) -> float:
        ahead = max(waiting + (arriving - rate) * at_s, 0.0)
        soon = rate * (until_s - at_s)  # what is served until the rate changes
        return ahead / rate if ahead <= soon else until_s - at_s + (ahead - soon) / later_rate

    # The wait is linear between these times. At the one in the middle, the rate changes when the prompt's turn comes.
    moments = [0.0, until_s]
    if arriving > 0:
        moments.append(min(max((rate * until_s - waiting) / arriving, 0.0), until_s))
    return max(map(wait_s, moments))


class LivePairs:
    """The pairs of one tick. ``from_devices``: what nodes send comes from the devices of the model's instances."""

    def __init__(
        self,
        state: ClusterState,
        index: Index,
        chains: Mapping[str, tuple[Chain, ...]],
        counts: Sequence[RoleCount],
        *,
        from_devices: bool,
    ) -> None:
        self._state, self._index, self._chains = state, index, chains
        self._counts = {(count.deployment.name, count.role): count for count in counts}
        self._from_devices = from_devices

    def paired(self, starts: Sequence[StartInstance]) -> list[StartInstance]:
        """Return the starts. Those at the ends of chains relieve the most loaded instances, where that is needed.

        Only prefills can be relieved, so a decode instance neither relieves another one nor is relieved. And the two
        compute on the same kind of processor.
        """
        alike: defaultdict[tuple[str, Role, Processor], list[StartInstance]] = defaultdict(list)
        for start in starts:
            if start.role != "decode":
                alike[self._kind(start)].append(start)
        partners: dict[str, str] = {}
        for found in alike.values():
            chains, loaded = self._chains.get(self._state.deployments[found[0].model].url, ()), self._loaded(found[0])
            by_node: defaultdict[str, list[str]] = defaultdict(list)
            for start in found:
                by_node[start.node].append(start.id)
            pairs = live_pairs(chains, [item.id for item in loaded], by_node)
            needed = [one.id for one in found if one.id in pairs and self._is_needed(one, chains, loaded)]
            partners |= {name: pairs[name] for name in needed}
        return [replace(start, partner=partners.get(start.id)) for start in starts]

    def _loaded(self, start: StartInstance) -> list[Instance]:
        """Return the instances that a new one can relieve, the most loaded first."""
        instances = self._index.instances.get(start.model, {}).values()
        alike = (item for item in instances if item.state == "ready" and self._kind(item) == self._kind(start))
        return sorted(alike, key=lambda item: (-item.running, item.id))

    def _is_needed(self, start: StartInstance, chains: Sequence[Chain], loaded: Sequence[Instance]) -> bool:
        """Return whether first tokens might be late if the instance helped nobody while its weights arrive.

        A prompt may wait for the instances together, at a gateway, or for the most loaded one of them.
        """
        deployment, load = self._state.deployments[start.model], self._state.loads.get(start.model, NO_LOAD)
        count = self._counts.get((start.model, start.role))
        rate = 0.0 if count is None else prefill_rate(deployment, count.monitor)
        chain = next((chain for chain in chains if start.node in chain.targets), None)
        if math.isinf(deployment.ttft_slo_s):
            return True
        if count is None or chain is None or not (rate and count.ready and deployment.size_bytes):
            return True
        node = self._state.nodes[start.node]
        measured = deployment.on(node.processor(deployment.device))
        prefill_s, arrival_s = 0.0, deployment.size_bytes / self._bytes_per_s(chain, start.model)
        if measured is not None:
            worker = WorkerRates(self._bytes_per_s(chain, start.model), node.load_bytes_per_s)
            prefill_s = measured.times.prefill_s
            arrival_s = measured.times.predicted_ttft_s([worker], full_memory=1) - prefill_s
        after = rate * max(count.wanted, count.ready)
        grown = replace(load, tokens_per_s=max(load.tokens_per_s, after))
        together_s = longest_wait_s(grown, rate * count.ready, after, arrival_s)
        running = sum(item.running for item in loaded)
        most_s = load.unanswered_tokens * loaded[0].running / running / rate if running else 0.0
        return max(load.longest_wait_s, together_s, most_s) + prefill_s > _SURE * deployment.ttft_slo_s

    def _bytes_per_s(self, chain: Chain, model: str) -> float:
        """Return how fast a chain is. Devices send over their own parts of their node's link."""
        if not self._from_devices or not chain.groups[0]:
            return chain.bytes_per_s
        shares = 0.0
        for name in chain.groups[0]:
            node = self._state.nodes[name]
            having = sum(one.model == model and one.state == "ready" for one in node.instances)
            shares += node.link_bytes_per_s * (min(having / node.slots, 1.0) if having else 1.0)
        return min(chain.bytes_per_s, shares)

    def _kind(self, one: StartInstance | Instance) -> tuple[str, Role, Processor]:
        """Return what two instances have in common of which one can relieve the other."""
        device = self._state.deployments[one.model].device
        return one.model, one.role, self._state.nodes[one.node].processor(device)


__all__ = ["LivePairs", "live_pairs", "longest_wait_s"]
