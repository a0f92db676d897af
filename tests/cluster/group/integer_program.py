"""The best schedule of live scaling, by an integer program: the yardstick of the queue (BlitzScale §5.2)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from benchmarks.pipeline.zigzag import Scaling, Schedule, schedule


@dataclass(frozen=True, slots=True)
class Solved:
    """What was found. ``gap``: how much smaller, as a fraction, the least mean may be, where the time was over."""

    schedule: Schedule
    gap: float = 0.0


def solve(scaling: Scaling, time_limit_s: float = 1.0) -> Solved:
    """Solve the integer program: the least mean latency with batches in order.

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
        return Solved(Schedule((), ()))

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
        return Solved(found)
    least = -math.inf if answer.mip_dual_bound is None else float(answer.mip_dual_bound)
    cost_found = reached + (found.mean - queued.mean) * count
    return Solved(found, min(max((cost_found - least) / (found.mean * count), 0.0), 1.0))


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
