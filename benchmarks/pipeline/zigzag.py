"""Schedules of live scaling, counted in layers: the queue that a live pair uses, and best effort (BlitzScale §5.2).

Time is counted in executions of one layer, from when the target has its first layer; each further layer takes ``load``
of them to arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

from medusa_cluster.policy.zigzag import PullQueue


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
    """For each batch, how many layers the target runs, and the time at which the source finishes it."""

    on_target: tuple[int, ...]
    finish: tuple[int, ...]

    @property
    def mean(self) -> float:
        return sum(self.finish) / len(self.finish) if self.finish else 0.0


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
