"""Live scaling: how many layers of each batch a new instance runs while its layers arrive (BlitzScale §5.2).

The target is the new instance, the source the loaded one that it relieves. Batches wait first come, first served; time
is counted in executions of one layer, from when the target has its first layer; each further layer takes ``load`` of
them to arrive. Three ways: the exact integer program, the queue that needs none, and best effort as a baseline.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any


@dataclass(frozen=True, slots=True)
class Scaling:
    """A new instance that loads while batches wait.

    ``weights``: a batch's time for one layer, by profile; prefill is about linear in its tokens.
    """

    layers: int
    load: int  # λ: executions of one layer of weight 1 while one layer arrives
    weights: tuple[int, ...]

    @classmethod
    def equal(cls, layers: int, load: int, batches: int) -> Scaling:
        return cls(layers, load, (1,) * batches)

    def loaded(self, time: int) -> int:
        """Return how many layers the target has at a time."""
        return self.layers if self.load == 0 else min(1 + time // self.load, self.layers)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the target runs of each batch, and when the source finishes it.

    ``gap``: how much smaller, as a fraction, the least mean may be, where an integer program was not solved to the end.
    """

    on_target: tuple[int, ...]
    finish: tuple[int, ...]
    gap: float = 0.0

    @property
    def mean(self) -> float:
        return sum(self.finish) / len(self.finish) if self.finish else 0.0


def solve(scaling: Scaling, time_limit_s: float = 1.0) -> Schedule:
    """Solve the integer program: the least mean latency with batches in order. Needs scipy (extra ``cluster``).

    ``schedule`` found an answer as good in every case tried, so this is the yardstick for it, and its answer bounds the
    program from above. From 32 layers on a proof can take minutes: when the time is over, the better of the two is the
    answer, with the gap that was left.

    With y_ik = [T_i ≥ k]: C1 is y_i1 = 1 and falling y; C2 and C3 are one family of constraints, that the target is
    done with its layers from the k-th on of batches up to i when the source begins i, none of which begins before layer
    k is there: Σ_{j≤i} Σ_{m≥k} w_j·y_jm ≤ d_i − (k−1)·λ, where T_i ≥ k. Exact for whole numbers.
    """
    import numpy
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    layers, weights = scaling.layers, scaling.weights
    count = len(weights)
    if count == 0:
        return Schedule((), ())

    def y(batch: int, layer: int) -> int:
        return batch * layers + layer - 1

    # finish_i = w_1·T_1 + Σ_{j≤i} w_j·(L − T_j): layer k of batch j on the target spares every later batch w_j.
    cost = numpy.zeros(count * layers)
    for batch, weight in enumerate(weights):
        cost[batch * layers : (batch + 1) * layers] = -weight * (count - batch)
    cost[:layers] += weights[0] * count
    rows: list[tuple[dict[int, float], float]] = []
    for batch in range(count):
        for layer in range(1, layers):
            rows.append(({y(batch, layer + 1): 1.0, y(batch, layer): -1.0}, 0.0))
        for layer in range(1, layers + 1):
            rows.append(_deadline(scaling, batch, layer, y))
    queued = schedule(scaling)
    reached = sum(float(sum(cost[batch * layers :][:taken])) for batch, taken in enumerate(queued.on_target))
    rows.append(({column: float(value) for column, value in enumerate(cost)}, reached))  # no worse than the queue
    values, where, bounds = [], [], []
    for number, (row, bound) in enumerate(rows):
        bounds.append(bound)
        for column, value in row.items():
            where.append((number, column))
            values.append(value)
    matrix = coo_array((values, tuple(zip(*where, strict=True))), shape=(len(rows), count * layers))
    lower = numpy.zeros(count * layers)
    lower[::layers] = 1.0  # T_i ≥ 1
    answer: Any = milp(
        cost,
        integrality=numpy.ones(count * layers),
        bounds=Bounds(lower, 1.0),
        constraints=LinearConstraint(matrix.tocsc(), ub=numpy.array(bounds)),
        # Costs are whole numbers, so less than one apart is as good as proven.
        options={"time_limit": time_limit_s, "mip_rel_gap": 0.99 / max(abs(reached), 1.0)},
    )
    found = queued
    if answer.x is not None:
        taken = numpy.rint(answer.x).reshape(count, layers).sum(axis=1)
        solved = _finish(scaling, [int(value) for value in taken])
        found = solved if answer.status == 0 or solved.mean < queued.mean else queued
    if answer.status in (0, 2):  # 2: nothing is as good as the queue
        return found
    least = -math.inf if answer.mip_dual_bound is None else float(answer.mip_dual_bound)
    cost_found = reached + (found.mean - queued.mean) * count
    return replace(found, gap=min(max((cost_found - least) / (found.mean * count), 0.0), 1.0))


def _deadline(scaling: Scaling, batch: int, layer: int, y: Any) -> tuple[dict[int, float], float]:
    """Return one row of C2 (layer 1) and C3 for ``milp``: coefficients of y and the upper bound."""
    weights, layers = scaling.weights, scaling.layers
    slack = float(sum(weights) * layers + layers * scaling.load)
    row: dict[int, float] = {}
    # d_i = w_1·T_1 + Σ_{j<i} w_j·(L − T_j); its terms in T go to the left.
    for earlier in range(batch):
        for number in range(1, layers + 1):
            row[y(earlier, number)] = row.get(y(earlier, number), 0.0) + weights[earlier]
    for number in range(1, layers + 1):
        row[y(0, number)] = row.get(y(0, number), 0.0) - weights[0]
    for earlier in range(batch + 1):
        for number in range(layer, layers + 1):
            row[y(earlier, number)] = row.get(y(earlier, number), 0.0) + weights[earlier]
    constant = float(sum(weights[:batch]) * layers - (layer - 1) * scaling.load)
    row[y(batch, layer)] = row.get(y(batch, layer), 0.0) + slack
    return row, constant + slack


def schedule(scaling: Scaling, *, take_untouched: bool = False) -> Schedule:
    """Schedule without an integer program: both instances take from one queue (BlitzScale Figure 16).

    The target runs one layer of the first batch whose next layer it has, and looks again after each. The source, when
    idle, takes the first batch of which at least one layer is done, and runs the rest; ``take_untouched``: also one of
    which none is done, where the target works on another.
    """
    count, layers = len(scaling.weights), scaling.layers
    queue = PullQueue(scaling.weights, layers)
    finish = [0] * count
    running: int | None = None  # the target's batch
    target_free, source_free, now = 0, 0, 0
    while queue.waiting or running is not None:
        if running is not None and target_free <= now:
            queue.ran(running)
            running = None
        while source_free <= now:
            taken = queue.pull(busy=running, untouched=take_untouched)
            if taken is None:
                break
            source_free = now + (layers - queue.done[taken]) * scaling.weights[taken]
            finish[taken] = source_free
        if running is None:
            running = queue.next(scaling.loaded(now))
            if running is not None:
                target_free = now + scaling.weights[running]
        later = [time for time in (target_free if running is not None else 0, source_free) if time > now]
        if running is None and scaling.load and scaling.loaded(now) < layers:
            later.append((now // scaling.load + 1) * scaling.load)
        if not later:
            break
        now = min(later)
    return Schedule(tuple(queue.done), tuple(finish))


class PullQueue:
    """The new instance's queue: first come first served among batches whose next layer is loaded.

    It is what the simulator and a live pair use; it knows no time.
    """

    def __init__(self, weights: Sequence[int], layers: int) -> None:
        self.done = [0] * len(weights)  # layers run on the target
        self.waiting = deque(range(len(weights)))
        self._layers = layers

    def next(self, loaded: int) -> int | None:
        """Return the batch of which the target runs one layer next."""
        return next((batch for batch in self.waiting if self.done[batch] < min(loaded, self._layers)), None)

    def ran(self, batch: int) -> None:
        self.done[batch] += 1

    def pull(self, busy: int | None, *, untouched: bool = False) -> int | None:
        """Give the source the head of the queue; None where it has to wait. ``busy``: what the target works on."""
        if not self.waiting:
            return None
        head = self.waiting[0]
        if head == busy or (not self.done[head] and not untouched):
            return None
        return self.waiting.popleft()


def best_effort(scaling: Scaling) -> Schedule:
    """Schedule as a naive instance does: each batch once over the target, with all layers that are there, at most half.

    The batches pass the target in order, then the source.
    """
    on_target, finish = [], []
    target, source = 0, 0
    for weight in scaling.weights:
        taken = max(1, min(scaling.loaded(target), scaling.layers // 2))
        target += taken * weight
        source = max(source, target) + (scaling.layers - taken) * weight
        on_target.append(taken)
        finish.append(source)
    return Schedule(tuple(on_target), tuple(finish))


def alone(scaling: Scaling) -> Schedule:
    """Return what the source does without the new instance."""
    return Schedule(
        (0,) * len(scaling.weights), tuple(accumulate(weight * scaling.layers for weight in scaling.weights))
    )


def is_feasible(scaling: Scaling, on_target: Sequence[int]) -> bool:
    """Return whether the target can run these layers in time: C1 to C3, checked with unit jobs by deadline."""
    if any(not 1 <= taken <= scaling.layers for taken in on_target):
        return False
    begins = _begins(scaling, on_target)
    jobs: list[tuple[int, int, int]] = []  # (release, deadline, batch), each as long as the batch's weight
    for batch, taken in enumerate(on_target):
        jobs += [(layer * scaling.load, begins[batch], batch) for layer in range(taken)]
    jobs.sort()
    ready: list[tuple[int, int]] = []
    now, number = 0, 0
    while number < len(jobs) or ready:
        if not ready:
            now = max(now, jobs[number][0])
        while number < len(jobs) and jobs[number][0] <= now:
            heapq.heappush(ready, (jobs[number][1], jobs[number][2]))
            number += 1
        deadline, batch = heapq.heappop(ready)
        now += scaling.weights[batch]
        if now > deadline:
            return False
    return True


def _begins(scaling: Scaling, on_target: Sequence[int]) -> list[int]:
    """Return when the source begins each batch: d_i."""
    rest = [(scaling.layers - taken) * weight for taken, weight in zip(on_target, scaling.weights, strict=True)]
    return [on_target[0] * scaling.weights[0] + before for before in accumulate(rest[:-1], initial=0)]


def _finish(scaling: Scaling, on_target: Sequence[int]) -> Schedule:
    begins = _begins(scaling, on_target)
    ends = (
        begin + (scaling.layers - taken) * weight
        for begin, taken, weight in zip(begins, on_target, scaling.weights, strict=True)
    )
    return Schedule(tuple(on_target), tuple(ends))
