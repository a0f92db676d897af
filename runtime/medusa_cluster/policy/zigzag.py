"""Live scaling: which layers of which batch a new instance runs while its layers arrive (BlitzScale §5.2, Figure 16).

The target is the new instance, the source the loaded one that it relieves. Batches wait first come, first served. How
far this is from the best schedule is checked against the paper's integer program, which only the tests solve.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class PullQueue:
    """The new instance's queue: first come first served among batches whose next layer is loaded.

    It knows no time.
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
