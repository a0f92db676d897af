"""The start of a model without instances: on one node, or on a group of nodes that compute alike."""

from __future__ import annotations

from .counting import NO_LOAD
from .fetches import Fetches
from .index import Index
from .placement import Placement
from .sizing import CandidateNode, Goal, Scheme, choose, predict
from .state import ClusterState, Deployment, Measured, Processor

_CANDIDATES = 16  # servers of a kind that are looked at for a group: the best ones


class Schemes:
    """The schemes of one tick. The options are those of ``Options`` in ``decide``."""

    def __init__(
        self,
        state: ClusterState,
        index: Index,
        placement: Placement,
        fetches: Fetches,
        *,
        hop_s: float,
        follows_memory: bool,
        largest_group: int,
    ) -> None:
        self._state, self._index, self._placement, self._fetches = state, index, placement, fetches
        self._hop_s, self._follows_memory, self._largest = hop_s, follows_memory, largest_group

    def choose(self, deployment: Deployment, number: int) -> Scheme | None:
        """Return the scheme by which ``number`` instances start. None if the model's starts are unknown.

        All workers compute on the same kind of processor. Of the kinds with a group that meets the SLOs, the one with
        the smallest is chosen, and accelerators before processors.
        """
        if deployment.times is None or deployment.layers < 2:
            return None
        accelerated = self._placement.on_accelerators(deployment)
        if accelerated is not None:
            found = self._choose(accelerated, number)
            if (found is not None and found.meets) or self._placement.waits(accelerated):
                return found
        return self._choose(deployment, number)

    def _choose(self, deployment: Deployment, number: int) -> Scheme | None:
        placement = self._placement
        holders = placement.holders(deployment, self._fetches.target(deployment.url))
        if holders and placement.can_hold(holders[0].node, deployment):
            measured, goal = self._goal(deployment, self._processor(holders[0], deployment), number)
            alone = predict(holders[:1], 1, measured.times, goal)
            if alone.meets:
                return alone
        schemes = []
        for processor, servers in self._places(deployment, holders).items():
            measured, goal = self._goal(deployment, processor, number)
            scheme = choose(servers, measured.times, goal, deployment.layers)
            schemes += [] if scheme is None else [scheme]
        return min(schemes, key=lambda one: (not one.meets, one.size, one.full, one.ttft_s), default=None)

    def _places(self, deployment: Deployment, holders: list[CandidateNode]) -> dict[Processor, list[CandidateNode]]:
        """Return places for workers by their processor: the holders and, of each kind, some of the best others."""
        found: dict[Processor, list[CandidateNode]] = {}
        for server in holders:
            found.setdefault(self._processor(server, deployment), []).append(server)
        most = {processor: len(servers) + _CANDIDATES for processor, servers in found.items()}
        kinds, full = self._index.count_processors(deployment), 0
        for server in self._placement.others(deployment):
            processor = self._processor(server, deployment)
            servers, limit = found.setdefault(processor, []), most.get(processor, _CANDIDATES)
            if len(servers) < limit:
                servers.append(server)
                full += len(servers) == limit
                if full == kinds:
                    break
        return found

    def _goal(self, deployment: Deployment, processor: Processor, number: int) -> tuple[Measured, Goal]:
        """Return what is known of starts on a processor, and the goal of ``number`` instances on it."""
        measured = deployment.on(processor)
        assert measured is not None
        largest = self._largest if deployment.gpu_groups or not processor.on_gpu else 1
        goal = Goal(
            deployment.ttft_slo_s,
            deployment.tpot_slo_s,
            self._state.loads.get(deployment.name, NO_LOAD).longest_wait_s,
            self._hop_s if measured.hop_s is None else measured.hop_s,
            self._follows_memory,
            kv_bytes=deployment.kv_bytes,
            least_full=min(number, largest),
            largest=largest,
        )
        return measured, goal

    def _processor(self, server: CandidateNode, deployment: Deployment) -> Processor:
        return self._state.nodes[server.node].processor(deployment.device)
