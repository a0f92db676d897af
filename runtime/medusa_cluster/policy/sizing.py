"""The number of workers that start a model together: the fewest that meet its SLOs (ParaServe §4.1, Algorithm 1).

Predictions are made from recorded stage times, by Eq. 5 for the first token, with overlapped stages, and by Eq. 2 for
the later ones. Eq. 1, without the overlap, is for systems that do not have it.

Beside N fetches on a node's link, a new one gets B/(N+1) of the bandwidth B (§4.2, Algorithm 2 and Eq. 3). The paper's
listing prints B/N, which contradicts Eq. 3. Eq. 4, the bytes pending after a while, is not computed, because nodes
report them. ``Placement`` says which fetches of a node count, and until when they have to end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from medusa_runtime.state.stage_times import StageTimes, WorkerRates

LARGEST_GROUP = 4  # larger ones gain little (ParaServe §4.1.2)
DEVICE_OVERHEAD_BYTES = 2 << 30  # beside weights, keys and values: the context, a forward, graphs and what stays free


@dataclass(frozen=True, slots=True)
class CandidateNode:
    """A place for a worker, with the bandwidth that a new fetch gets there.

    ``free_bytes`` of host memory are free for weights, and ``device_bytes`` of a device's for weights, keys and values.
    """

    node: str
    fetch_bytes_per_s: float
    load_bytes_per_s: float = math.inf
    free_bytes: float = math.inf
    device_bytes: float = math.inf

    @property
    def s_per_byte(self) -> float:
        """The seconds to fetch and then load a byte: 1/b + 1/p."""
        return 1 / self.fetch_bytes_per_s + 1 / self.load_bytes_per_s

    def fits(self, weights_bytes: float, kv_bytes: float) -> bool:
        return self.free_bytes >= weights_bytes and self.device_bytes >= weights_bytes + kv_bytes


@dataclass(frozen=True, slots=True)
class Scheme:
    """A plan for a cold start: the workers' nodes, with predicted times.

    The first ``full`` of the nodes have memory for the whole model.
    """

    nodes: tuple[str, ...]
    full: int
    ttft_s: float
    tpot_s: float
    meets: bool  # both SLOs

    @property
    def size(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True, slots=True)
class Goal:
    """The SLOs that a start has to meet, and the conditions under which its workers run.

    ``follows_memory``: a worker with a part of the memory has a part of the computing power, as GPUs are shared in the
    paper's cluster. Elsewhere every worker computes at full speed, and w = s in the equations.
    """

    ttft_s: float
    tpot_s: float
    waiting_s: float = 0.0  # t_w
    hop_s: float = 0.0  # t_n
    follows_memory: bool = False
    kv_bytes: int = 0  # keys and values that a worker needs room for, also with a part of the layers
    least_full: int = 1  # at least one worker must have room for the whole model when the group is consolidated
    largest: int = LARGEST_GROUP


def choose(servers: Iterable[CandidateNode], times: StageTimes, goal: Goal, layers: int = 0) -> Scheme | None:
    """Return the smallest group, and in it the fewest full-memory workers, that meets both SLOs.

    If no group meets them, it is one worker on the best server with room for the whole model, and ``meets`` is false.
    None if no server has that room. ``layers`` is the model's number of layers, and so the largest possible group; 0 if
    it is unknown.
    """
    usable = [server for server in servers if server.fetch_bytes_per_s > 0]
    largest = min(goal.largest, layers) if layers else goal.largest
    weights, kv = times.weights_bytes, goal.kv_bytes
    fitting = [server for server in usable if server.fits(weights, kv)]
    fallback: Scheme | None = None
    for size in range(1, largest + 1):
        partly = [server for server in usable if server.fits(weights / size, kv)]
        best = heapq.nsmallest(2 * size, partly, key=_rank)
        full = heapq.nsmallest(size, fitting, key=_rank)
        for count in range(1 if size == 1 else min(goal.least_full, size), size + 1):
            group = _group(full, best, size, count)
            if group is None:
                continue
            scheme = predict(group, count, times, goal)
            if scheme.meets:
                return scheme
            if size == 1:
                fallback = scheme
    return fallback


def predict(group: Sequence[CandidateNode], full: int, times: StageTimes, goal: Goal) -> Scheme:
    """Return a group's scheme, with its times predicted by Eq. 5 and Eq. 2."""
    workers = [WorkerRates(server.fetch_bytes_per_s, server.load_bytes_per_s) for server in group]
    computing = full if goal.follows_memory else len(group)
    hop_s = goal.hop_s if len(group) > 1 else 0.0
    ttft = times.predicted_ttft_s(workers, full_memory=computing, waiting_s=goal.waiting_s, hop_s=hop_s)
    tpot = times.predicted_tpot_s(len(group), full_memory=computing, hop_s=hop_s)
    meets = ttft <= goal.ttft_s and tpot <= goal.tpot_s
    return Scheme(tuple(server.node for server in group), full, ttft, tpot, meets)


def parts(layers: int, size: int) -> tuple[tuple[int, int], ...]:
    """Divide layers as evenly as possible among a group's workers. The first ones may hold one more."""
    each, more = divmod(layers, size)
    ends = [0]
    for number in range(size):
        ends.append(ends[-1] + each + (number < more))
    return tuple(pairwise(ends))


def _group(
    full: Sequence[CandidateNode], best: Sequence[CandidateNode], size: int, count: int
) -> list[CandidateNode] | None:
    """Return the ``count`` best servers with room for the whole model, then the best others, with room for a part.

    None if there are too few. ``best`` has 2 * ``size`` servers, so enough of them are left without those in ``full``.
    """
    if len(full) < count:
        return None
    group = list(full[:count])
    taken = {server.node for server in group}
    group += [server for server in best if server.node not in taken][: size - count]
    return group if len(group) == size else None


def _rank(server: CandidateNode) -> tuple[float, str]:
    return server.s_per_byte, server.node


@dataclass(frozen=True, slots=True)
class Fetching:
    """A fetch of a node: the bytes that are missing, and when all of them have to be there."""

    name: str
    pending_bytes: float
    deadline_s: float


def newcomer_bytes_per_s(link_bytes_per_s: float, fetching: Sequence[Fetching], now_s: float) -> float:
    """Return the bandwidth for one more fetch, or 0 if another one would then miss its deadline (Eq. 3)."""
    share = link_bytes_per_s / (len(fetching) + 1)
    if any(fetch.pending_bytes > share * (fetch.deadline_s - now_s) for fetch in fetching):
        return 0.0
    return share
