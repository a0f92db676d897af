"""A spare: a prefetcher that waits for the next model, with a region whose first pages are already allocated.

Allocating pages of shared memory takes half of the CPU time of a fetch from another node, and a fork has to come before
the first byte. Both can be done while the machine is idle.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from ...errors import MedusaError
from ...liveness import Heartbeats
from ...region.reader import Region
from ..child import REAPER, Child
from ..event_loop import EventLoop
from ..messages import receive

logger = logging.getLogger(__name__)

_QUIET_S = 2.0  # how long to wait after a fetch: the import or the first forward that follows it needs the cores
_AGAIN_S = 30.0  # how long to wait after a spare that could not be made, or has died


class Spare(NamedTuple):
    """An empty region, and the process that will fill it. ``size_bytes`` is the size of the allocated pages."""

    region: Region
    demand_fd: int
    heartbeats: Heartbeats
    child: Child
    size_bytes: int


class Spares:
    """Keeps one spare, which ``start`` makes; without ``start``, none. ``fits`` says whether there is memory for it."""

    def __init__(self, start: Callable[[], Spare] | None, fits: Callable[[], bool], loop: EventLoop) -> None:
        self._start = start
        self._fits = fits
        self._loop = loop
        self._spare: Spare | None = None
        self._ready = False  # whether its pages are allocated
        self._next_at = 0.0

    @property
    def size_bytes(self) -> int:
        """The memory that the spare takes; 0 without one."""
        return self._spare.size_bytes if self._spare else 0

    def tick(self, *, idle: bool) -> None:
        """Make a spare if it is time for one. ``idle`` says that nothing is being fetched."""
        now = time.monotonic()
        if not idle:
            self._next_at = max(self._next_at, now + _QUIET_S)
        elif self._start is not None and self._spare is None and now >= self._next_at and self._fits():
            try:
                self._spare = self._start()
            except MedusaError as error:
                logger.debug("%s", error)
                self._next_at = now + _AGAIN_S
            else:
                self._ready = False
                self._loop.watch(self._spare.child.channel, self._on_message)

    @property
    def ready_bytes(self) -> int:
        """The memory that is allocated for the next model."""
        return self.size_bytes if self._ready else 0

    def take(self) -> Spare | None:
        """Hand out the spare; None if none is ready."""
        return self._detach() if self._ready else None

    def _detach(self) -> Spare | None:
        spare, self._spare, self._ready = self._spare, None, False
        if spare is not None:
            self._loop.unwatch(spare.child.channel)
            self._next_at = time.monotonic() + _QUIET_S
        return spare

    def _on_message(self) -> None:
        assert self._spare is not None
        if receive(self._spare.child.channel) is not None:
            self._ready = True
            return
        self.drop()  # the process has ended
        self._next_at = time.monotonic() + _AGAIN_S

    def drop(self) -> None:
        """End the spare, and free its memory."""
        if (spare := self._detach()) is not None:
            REAPER.kill(spare.child)
            spare.region.close()
            os.close(spare.demand_fd)


__all__ = ["Spare", "Spares"]
