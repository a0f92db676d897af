"""The number of instances that a model needs: bounds on the load with hysteresis, and fair shares of a full cluster.

BlitzScale §5.3 and the policy of its router: up at once as far as the load demands, down by one after a time below the
lower bound. The load counts as what the last moments had at most, so a gap between two bursts ends nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from .state import Deployment, Load

# Gateways count tokens over this time. What instances did in it says what they can do only if they were busy all the
# time; else a burst that finds one idle, or waits for one, is answered with many times the instances that it needs.
_COUNTED_S = 2.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds at which to scale, as fractions of what one instance can do, and times."""

    tokens_upper: float = 0.8
    tokens_lower: float = 0.5
    counts_waiting: bool = False  # prompt tokens that wait are the load, as in the router; else those that arrive
    kv_upper: float = 0.95
    kv_lower: float = 0.75
    requests_upper: float = 1.0  # of an instance's concurrency
    requests_lower: float = 0.5
    window_s: float = 1.0  # the load counts as its maximum in this time when scaling down
    spare_s: float = 0.333  # an instance is ended when one was spare for so long
    keep_alive_s: float = 30.0  # the last instance is ended when no request came for so long


@dataclass(frozen=True, slots=True)
class Monitor:
    """The history of one model's load."""

    samples: tuple[tuple[float, float], ...] = ()  # (time, instances' worth of load), the window's falling maxima
    spare_since_s: float | None = None
    tokens_per_s: float = 0.0  # the most prompt tokens that one busy instance was seen to take
    counted: bool = False  # while it was busy all the time; before that, they count for nothing
    wanted: int = 0  # instances, as was found last


class Need(NamedTuple):
    """The number of instances for a load: at least, so that no bound is exceeded, and at most, so that none idles."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """The number of instances that a model should have, and the least number that would do."""

    count: int
    least: int
    monitor: Monitor


def need(deployment: Deployment, load: Load, ready: int, tokens_per_s: float, bounds: Bounds) -> Need:
    """Return the instances that a load needs, by prompt tokens a second, requests at once, and KV blocks."""
    requests = (load.waiting + load.running) / max(deployment.concurrency, 1)
    least, most = requests / bounds.requests_upper, requests / bounds.requests_lower
    if tokens_per_s > 0:
        tokens = (load.waiting_tokens if bounds.counts_waiting else load.tokens_per_s) / tokens_per_s
        least, most = max(least, tokens / bounds.tokens_upper), max(most, tokens / bounds.tokens_lower)
    if load.kv_use > 0:
        blocks = load.kv_use * ready
        least, most = max(least, blocks / bounds.kv_upper), max(most, blocks / bounds.kv_lower)
    return Need(_ceil(least), max(_ceil(least), _ceil(most)))


def scale_target(
    deployment: Deployment,
    load: Load,
    *,
    current: int,
    ready: int,
    ready_since_s: float = -math.inf,
    now_s: float,
    monitor: Monitor,
    bounds: Bounds,
) -> ScaleTarget:
    """Return how many instances the model should have now. ``current`` counts those that start, and not those that end.

    ``ready_since_s``: when the last of the ready ones became ready.
    Needs more: at once to the middle of what the bounds allow. Needs fewer: one less, after ``spare_s``.
    """
    learned, counted = monitor.tokens_per_s, monitor.counted
    if ready and load.waiting > 0:
        learned = max(learned, load.prefilled_per_s / ready)
        counted |= min(load.longest_wait_s, now_s - ready_since_s) >= _COUNTED_S
    found = need(deployment, load, ready, deployment.tokens_per_s or (learned if counted else 0.0), bounds)
    samples = _window(monitor.samples, now_s, float(found.most), bounds.window_s)
    most = int(samples[0][1])
    if current < found.least:
        count, spare = (found.least + found.most + 1) // 2, None
    elif current > max(most, deployment.min, _kept(load, now_s, bounds)):
        spare = now_s if monitor.spare_since_s is None else monitor.spare_since_s
        count = current
        if now_s - spare >= bounds.spare_s:
            count, spare = current - 1, now_s
    else:
        count, spare = current, None
    low, high = deployment.min, max(deployment.max, deployment.min)
    least = min(max(found.least, low), high)
    count = min(max(count, low), high)
    return ScaleTarget(count, least, Monitor(samples, spare, learned, counted, count))


def prefill_rate(deployment: Deployment, monitor: Monitor) -> float:
    """Return the prompt tokens that one instance takes in a second, as far as that is known; 0: it is not."""
    return deployment.tokens_per_s or (monitor.tokens_per_s if monitor.counted else 0.0)


class Turn(NamedTuple):
    """A model's place among those that cannot all have an instance. The lowest ones get one."""

    rank: int = 0
    order_s: float = 0.0
    starts: bool = False  # it has no instance
    is_late: bool = False  # it has waited for so long that those that start must leave it what it needs
    left_s: float = 0.0  # until it may lose its place


def shares(
    demands: Mapping[str, int],
    deployments: Mapping[str, Deployment],
    slots: int,
    slots_of: Mapping[str, int] | None = None,
    turns: Mapping[str, Turn] | None = None,
) -> dict[str, int]:
    """Divide slots among models that want more instances than there are slots for: weighted max-min fairness.

    ``slots_of``: how many each of a model's instances takes; None: one. Minimums come first. Then the model that has
    the least slots for its weight gets an instance, if it fits, until it has what it wants. Of those that have none,
    the one whose turn is the lowest comes first, if there are ``turns``. If it is late and does not fit, no other one
    starts on what is left: models that serve give it up one after the other, and each gives too little. Returns
    instances.
    """
    each = dict.fromkeys(demands, 1) if slots_of is None else slots_of
    if sum(count * each[name] for name, count in demands.items()) <= slots:
        return dict(demands)
    given: dict[str, int] = {}
    left = slots
    for name in sorted(demands):
        given[name] = min(deployments[name].min, demands[name], left // each[name])
        left -= given[name] * each[name]

    def rank(name: str) -> tuple[float, tuple[int, float], int, str, Turn]:
        turn = Turn() if turns is None or given[name] else turns[name]
        return given[name] * each[name] / deployments[name].weight, turn[:2], each[name], name, turn

    heap = [rank(name) for name in demands if given[name] < demands[name]]
    heapq.heapify(heap)
    is_left = False
    while left and heap:
        *_, name, turn = heapq.heappop(heap)
        if each[name] > left:
            is_left |= turn.is_late
            continue
        if turn.starts and is_left:
            continue
        given[name] += 1
        left -= each[name]
        if given[name] < demands[name]:
            heapq.heappush(heap, rank(name))
    return given


def prescaled(load: Load, prefill: int, prefill_wanted: int) -> Load:
    """Return a load as decode instances will have it once prefill has grown (BlitzScale §5.4).

    The requests that make prefill grow arrive at the decode instances a moment later, so those need not wait to see it.
    What these run grows at most in step with prefill, and by no more than what waits.
    """
    decoding = replace(load, waiting=0, tokens_per_s=0.0, waiting_tokens=0.0)
    if prefill_wanted <= prefill or not prefill:
        return decoding
    if not load.running:
        return replace(decoding, running=load.waiting)
    growth = min(1 + load.waiting / load.running, prefill_wanted / prefill)
    return replace(decoding, running=round(load.running * growth), kv_use=load.kv_use * growth)


def _kept(load: Load, now_s: float, bounds: Bounds) -> int:
    return 1 if now_s - load.last_request_s < bounds.keep_alive_s else 0


def _window(
    samples: tuple[tuple[float, float], ...], now_s: float, value: float, window_s: float
) -> tuple[tuple[float, float], ...]:
    """Add a sample. Kept are the samples of the window that no later one exceeds, so the first is the maximum."""
    if len(samples) == 1 and samples[0][1] <= value:
        return ((now_s, value),)
    kept = [sample for sample in samples if sample[1] > value and now_s - sample[0] < window_s]
    return (*kept, (now_s, value))


def _ceil(amount: float) -> int:
    return math.ceil(amount - 1e-9)
