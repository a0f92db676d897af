"""Check from time to time, in a child process, whether objects in a store are still those that were fetched."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial

from ...errors import MedusaError
from ...process import ReportPipe
from ...storage.base import redacted, scheme_of
from ...timeline import Timeline
from ..callers.policy import Policy
from ..child import ENDING, Child, close_others, start_child
from ..event_loop import EventLoop
from ..messages import receive, send
from .fetching import open_store_of
from .held_region import HeldRegion

logger = logging.getLogger(__name__)

_NICE = 10
_GIVE_UP_S = 120.0


class Revalidation:
    """Checks one region at a time. ``on_change`` is called with a region whose objects have been replaced."""

    def __init__(
        self,
        every_s: float,
        on_change: Callable[[HeldRegion], None],
        *,
        policy: Policy,
        timeline: Timeline,
        reports: ReportPipe,
        loop: EventLoop,
    ) -> None:
        self._every_s = every_s
        self._on_change = on_change
        self._timeline = timeline
        self._reports = reports
        self._policy = policy
        self._loop = loop
        self._check: Child | None = None
        self._began = 0.0

    def tick(self, regions: Iterable[HeldRegion]) -> None:
        """Check the region whose last check is longest ago, if it is due. Local files are checked on each request."""
        now = time.monotonic()
        if self._check is not None:
            if now - self._began > _GIVE_UP_S:
                self._end()
            return
        due = [held for held in regions if now - held.looked_at > self._every_s and scheme_of(held.key)]
        due = [held for held in due if held.fetch is None and held.complete]
        if self._every_s and due:
            self._begin(min(due, key=lambda held: held.looked_at), now)

    def _begin(self, held: HeldRegion, now: float) -> None:
        held.looked_at = self._began = now
        try:
            body = partial(_run, held, self._policy, self._reports)
            self._check = start_child("revalidate", body, timeline=self._timeline, reports=self._reports)
        except MedusaError as error:
            logger.warning("%s could not be checked: %s", redacted(held.key), error)
            return
        self._loop.watch(self._check.channel, lambda: self._on_message(held))

    def _on_message(self, held: HeldRegion) -> None:
        assert self._check is not None
        message = receive(self._check.channel)
        self._end()
        if message is not None and message.kind == "changed":
            logger.info("%s has changed in its store; the next function gets the new version", redacted(held.key))
            self._on_change(held)

    def _end(self) -> None:
        if self._check is not None:
            self._loop.unwatch(self._check.channel)
            ENDING.kill(self._check)
            self._check = None

    def close(self) -> None:
        self._end()


def _run(held: HeldRegion, policy: Policy, reports: ReportPipe, channel: socket.socket, timeline: Timeline) -> int:
    close_others(channel.fileno(), held.region.fd, timeline.fd, reports.write_fd)
    os.nice(_NICE)
    from ...checkpoint.reader import open_checkpoint

    try:
        checkpoint = open_checkpoint(held.key, store=open_store_of(held.key, policy))
    except MedusaError as error:
        logger.debug("%s could not be checked: %s", redacted(held.key), error)
        return 0  # a store that does not answer proves nothing about its objects
    index = held.region.wait_index()
    same = checkpoint.index.shards == index.shards
    if not same or any(held.region.file(name) != body for name, body in checkpoint.files.items()):
        send(channel, "changed")
    return 0
