"""The queue of a new instance, which decides whose layer runs next and what is handed over (BlitzScale Figure 16)."""

from __future__ import annotations

from itertools import count


class ZigZag:
    """A queue of batches, numbered from 0. It knows neither time nor tensors, and is asked between two layers.

    First come, first served among batches whose next layer is there. An idle source gets the batch at the head, without
    ``untouched`` only one of which a layer has run. Tests compare this with the best schedule, by solving the paper's
    integer program.
    """

    def __init__(self, layers: int, *, untouched: bool = True) -> None:
        self._layers, self._untouched = layers, untouched
        self._numbers = count()
        self._done: dict[int, int] = {}  # of each batch that waits, in order: how many of its layers have run

    def __len__(self) -> int:
        return len(self._done)

    def add(self, done: int = 0) -> int:
        """Add a batch of which ``done`` layers have run elsewhere, and return its number."""
        number = next(self._numbers)
        self._done[number] = done
        return number

    def next(self, loaded: int) -> int | None:
        """Return the batch whose next layer should run, if ``loaded`` layers are there. None: nothing can run."""
        return next((batch for batch, done in self._done.items() if done < loaded), None)

    def layer_done(self, batch: int) -> None:
        """Note that a layer of the batch has run."""
        self._done[batch] += 1

    def done(self, batch: int) -> int:
        """Return how many layers of a batch that waits have run."""
        return self._done[batch]

    def pull(self, loaded: int, busy: int | None = None) -> int | None:
        """Take the batch to hand over from the queue, or return None if the source has to wait.

        ``busy`` is the batch of which a layer runs; between two layers there is none.
        """
        head = next(iter(self._done), None)
        if head is None or head == busy or not self._may_go(head, loaded):
            return None
        del self._done[head]
        return head

    def _may_go(self, head: int, loaded: int) -> bool:
        return self._untouched or self._done[head] > 0


class WholePrompts(ZigZag):
    """A prefill instance's queue: each batch through all layers, in order, and then handed over (BlitzScale §5.4).

    While the instance still loads, it relieves the source as in live scaling.
    """

    def _may_go(self, head: int, loaded: int) -> bool:
        return loaded < self._layers or self._done[head] == loaded


class BestEffort(ZigZag):
    """The paper's baseline: each batch once, in order, with the layers there when it begins, at most half of them."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self._goals: dict[int, int] = {}

    def next(self, loaded: int) -> int | None:
        for batch, done in self._done.items():
            if not loaded and batch not in self._goals:
                return None
            if done < self._goals.setdefault(batch, max(1, min(loaded, self._layers // 2))):
                return batch
        return None

    def _may_go(self, head: int, loaded: int) -> bool:
        return not loaded or self._goals.get(head) == self._done[head]

    def pull(self, loaded: int, busy: int | None = None) -> int | None:
        taken = super().pull(loaded, busy)
        self._goals.pop(-1 if taken is None else taken, None)
        return taken


_QUEUES: dict[str, type[ZigZag]] = {"best-effort": BestEffort, "whole": WholePrompts, "zigzag": ZigZag}


def layer_queue(schedule: str, layers: int) -> ZigZag:
    """Return a new queue by its name: that of ``GroupPlan.queue``."""
    return _QUEUES[schedule](layers)


__all__ = ["BestEffort", "WholePrompts", "ZigZag", "layer_queue"]
