"""Live scaling: the choice of the batch whose layers a new instance runs meanwhile (BlitzScale §5.2, Figure 16).

The target is the new instance, and the source the loaded one that it relieves. Batches are served first come, first
served. Tests compare this with the best schedule, by solving the paper's integer program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class PullQueue:
    """The new instance's queue: first come, first served among batches whose next layer is loaded. It has no clock."""

    def __init__(self, weights: Sequence[int], layers: int) -> None:
        self.done = [0] * len(weights)  # layers run on the target
        self.waiting = deque(range(len(weights)))
        self._layers = layers

    def next(self, loaded: int) -> int | None:
        """Return the batch whose next layer the target runs, or None."""
        return next((batch for batch in self.waiting if self.done[batch] < min(loaded, self._layers)), None)

    def layer_done(self, batch: int) -> None:
        self.done[batch] += 1

    def pull(self, busy: int | None, *, untouched: bool = False) -> int | None:
        """Take the head of the queue for the source, or return None if the source has to wait.

        ``busy`` is the batch that the target works on. With ``untouched``, a batch may go without any layer run.
        """
        if not self.waiting:
            return None
        head = self.waiting[0]
        if head == busy or (not self.done[head] and not untouched):
            return None
        return self.waiting.popleft()
