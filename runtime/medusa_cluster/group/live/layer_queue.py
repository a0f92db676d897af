"""The queue of a new instance, which decides whose layer runs next and what is handed over (BlitzScale Figure 16)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...policy.zigzag import PullQueue


class LayerQueue(Protocol):
    """A queue of batches, numbered from 0. It knows neither time nor tensors, and is asked between two layers."""

    def add(self, done: int = 0) -> int:
        """Add a batch of which ``done`` layers have run elsewhere, and return its number."""

    def next(self, loaded: int) -> int | None:
        """Return the batch whose next layer should run, if ``loaded`` layers are there. None: nothing can run."""

    def layer_done(self, batch: int) -> None:
        """Note that a layer of the batch has run."""

    def pull(self, loaded: int) -> int | None:
        """Return the batch to hand over, or None if the source has to wait."""

    def done(self, batch: int) -> int:
        """Return how many layers of the batch have run."""


class ZigZag:
    """First come, first served among batches whose next layer is there. An idle source gets the batch at the head."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._queue = PullQueue((), layers)

    def add(self, done: int = 0) -> int:
        self._queue.done.append(done)
        self._queue.waiting.append(len(self._queue.done) - 1)
        return len(self._queue.done) - 1

    def next(self, loaded: int) -> int | None:
        return self._queue.next(loaded)

    def layer_done(self, batch: int) -> None:
        self._queue.layer_done(batch)

    def pull(self, loaded: int) -> int | None:
        # Between two layers the head is not being worked on. An idle source takes it even if no layer has run.
        return self._queue.pull(None, untouched=True)

    def done(self, batch: int) -> int:
        return self._queue.done[batch]


class WholePrompts(ZigZag):
    """A prefill instance's queue: each batch through all layers, in order, and then handed over (BlitzScale §5.4).

    While the instance still loads, it relieves the source as in live scaling.
    """

    def pull(self, loaded: int) -> int | None:
        if loaded == self._layers and self._queue.waiting and self.done(self._queue.waiting[0]) < loaded:
            return None
        return super().pull(loaded)


class BestEffort:
    """The paper's baseline: each batch once, in order, with the layers there when it begins, at most half of them."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._done: list[int] = []
        self._goals: list[int] = []
        self._first = 0  # the first batch that has not been handed over

    def add(self, done: int = 0) -> int:
        self._done.append(done)
        self._goals.append(0)
        return len(self._done) - 1

    def next(self, loaded: int) -> int | None:
        for batch in range(self._first, len(self._done)):
            if not self._goals[batch] and loaded:
                self._goals[batch] = max(1, min(loaded, self._layers // 2))
            if self._done[batch] < self._goals[batch]:
                return batch
            if not self._goals[batch]:
                return None
        return None

    def layer_done(self, batch: int) -> None:
        self._done[batch] += 1

    def done(self, batch: int) -> int:
        return self._done[batch]

    def pull(self, loaded: int) -> int | None:
        if self._first == len(self._done):
            return None
        head = self._first
        if loaded and not 0 < self._goals[head] == self._done[head]:
            return None
        self._first += 1
        return head


def layer_queue(schedule: str, layers: int) -> LayerQueue:
    kinds: dict[str, Callable[[int], LayerQueue]] = {"best-effort": BestEffort, "whole": WholePrompts, "zigzag": ZigZag}
    return kinds[schedule](layers)


__all__ = ["BestEffort", "LayerQueue", "WholePrompts", "ZigZag", "layer_queue"]
