"""Schedules of live scaling, counted in layers: the queue that a live pair uses, and best effort (BlitzScale §5.2).

The unit of time is an execution of one layer. Time begins when the target has its first layer, and each further layer
takes ``load`` units to arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

from medusa_cluster.group.live.layer_queue import ZigZag


@dataclass(frozen=True, slots=True)
class Scaling:
    """A new instance that loads while batches wait.

    ``weights`` has each batch's time for one layer. It comes from a profile: a prefill is about linear in its tokens.
    """

    layers: int
    load: int  # λ: executions of one layer of weight 1 while one layer arrives
    weights: tuple[int, ...]

    @classmethod
    def equal(cls, layers: int, load: int, batches: int) -> Scaling:
        return cls(layers, load, (1,) * batches)

    def loaded(self, time: int) -> int:
        """Return how many layers the target has at this time."""
        return self.layers if self.load == 0 else min(1 + time // self.load, self.layers)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule: for each batch, how many layers the target runs, and when the source finishes it."""

    on_target: tuple[int, ...]
    finish: tuple[int, ...]

    @property
    def mean(self) -> float:
        return sum(self.finish) / len(self.finish) if self.finish else 0.0


def schedule(scaling: Scaling, *, take_untouched: bool = False) -> Schedule:
    """Schedule without an integer program: both instances take from one queue (BlitzScale Figure 16).

    The target runs one layer of the first batch whose next layer it has, and then looks again. The idle source takes
    the first batch with at least one finished layer, and runs the rest of it. With ``take_untouched``, it also takes a
    batch without a finished layer while the target works on another batch.
    """
    count, layers = len(scaling.weights), scaling.layers
    queue = ZigZag(layers, untouched=take_untouched)
    for _ in range(count):
        queue.add()
    on_target, finish = [0] * count, [0] * count
    running: int | None = None  # the target's batch
    target_free, source_free, now = 0, 0, 0
    while queue or running is not None:
        if running is not None and target_free <= now:
            queue.layer_done(running)
            on_target[running] += 1
            running = None
        while source_free <= now:
            taken = queue.pull(layers, busy=running)
            if taken is None:
                break
            source_free = now + (layers - on_target[taken]) * scaling.weights[taken]
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
    return Schedule(tuple(on_target), tuple(finish))


def best_effort(scaling: Scaling) -> Schedule:
    """Schedule like a naive instance: the target runs each batch once, with the layers it has, at most half of all.

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
