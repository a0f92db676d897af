"""The source's side of a pair: a target that helps, and the batches that it was offered."""

from __future__ import annotations

from collections import deque

from ..identity import Heartbeats
from ..wire.channel import TcpChannel
from .handover import BATCH_TOKENS, Batch, Handover

_MOST_BATCHES = 4  # in the queue of one that relieves others: so many it may finish alone, once it has all layers


class Pair:
    """A target that helps. The thread that listens to it sets what its heartbeats say."""

    def __init__(self, channel: TcpChannel, heartbeats: Heartbeats) -> None:
        self.channel = channel
        self.heartbeats = heartbeats
        self.offered: dict[int, Batch] = {}
        self.arrived: deque[Handover] = deque()
        self.pulled = False  # a pull has not been answered yet, or its answer is still in our inbox
        self.due = False  # a handover may come; the listening thread resets this
        self.loading = True  # it lacks layers
        self.leaving = False  # it gets no more offers
        self.relieves = False  # while it loads, it runs first layers for those that have all of them

    @property
    def tokens(self) -> int:
        """Return how many tokens it was offered and has not handed over yet."""
        return sum(span.stop for batch in self.offered.values() for span in batch.spans)

    @property
    def is_busy(self) -> bool:
        """True while it has its next batch already. What waits behind that one gains no layers meanwhile."""
        return len(self.offered) > 1 and self.tokens >= 2 * BATCH_TOKENS

    @property
    def is_full(self) -> bool:
        """True if it has as many batches as one that relieves others should have at once."""
        return len(self.offered) >= _MOST_BATCHES


__all__ = ["Pair"]
