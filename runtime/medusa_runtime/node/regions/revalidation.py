"""Check from time to time, in a child process, whether objects in a store are still those that were fetched."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from functools import partial

from ...errors import MedusaError
from ...process import ReportPipe, end_first
from ...storage.base import redacted, scheme_of
from ...timeline import Timeline
from ..callers.policy import Policy
from ..child import REAPER, Child, close_others, start_child
from ..event_loop import EventLoop
from ..messages import receive, send
from .fetching import limit_memory, open_store_of
from .pool import RegionPool
from .region_entry import RegionEntry

logger = logging.getLogger(__name__)

_NICE = 10
_GIVE_UP_S = 120.0


class Revalidation:
    """Checks one region at a time. ``on_change`` is called with a region whose objects have been replaced."""

    def __init__(
        self,
        every_s: float,
        on_change: Callable[[RegionEntry], None],
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
        self._failing: set[str] = set()  # the slots of regions whose last check failed, so that this is logged once
        self._check: Child | None = None
        self._began = 0.0

    def tick(self, regions: RegionPool) -> None:
        """Check the region whose last check is longest ago, if it is due. Local files are checked on each request."""
        now = time.monotonic()
        if self._check is not None:
            if now - self._began > _GIVE_UP_S:
                self._end()
            return
        due = [entry for entry in regions if now - entry.checked_at > self._every_s and scheme_of(entry.key)]
        due = [entry for entry in due if entry.fetch is None and entry.complete]
        if self._every_s and due:
            self._failing.intersection_update(entry.slot for entry in regions)
            self._begin(min(due, key=lambda entry: entry.checked_at), now)

    def _begin(self, entry: RegionEntry, now: float) -> None:
        entry.checked_at = self._began = now
        try:
            body = partial(_run, entry, self._policy, self._reports)
            self._check = start_child("revalidate", body, timeline=self._timeline, reports=self._reports)
        except MedusaError as error:
            logger.warning("%s could not be checked: %s", redacted(entry.key), error)
            return
        self._loop.watch(self._check.channel, lambda: self._on_message(entry))

    def _on_message(self, entry: RegionEntry) -> None:
        assert self._check is not None
        message = receive(self._check.channel)
        self._end()
        if message is None:
            return
        if message.kind == "failed" and entry.slot not in self._failing:
            self._failing.add(entry.slot)
            logger.warning(
                "it is not known whether %s has changed in its store; functions get what is here: %s",
                redacted(entry.key),
                message.body["message"],
            )
        elif message.kind != "failed" and entry.slot in self._failing:
            self._failing.remove(entry.slot)
            logger.info("%s can be checked again", redacted(entry.key))
        if message.kind == "changed":
            logger.info("%s has changed in its store; the next function gets the new version", redacted(entry.key))
            self._on_change(entry)

    def _end(self) -> None:
        if self._check is not None:
            self._loop.unwatch(self._check.channel)
            REAPER.kill(self._check)
            self._check = None

    def close(self) -> None:
        self._end()


def _run(entry: RegionEntry, policy: Policy, reports: ReportPipe, channel: socket.socket, timeline: Timeline) -> int:
    close_others(channel.fileno(), entry.region.fd, timeline.fd, reports.write_fd)
    end_first()
    limit_memory()
    os.nice(_NICE)
    from ...checkpoint.reader import open_checkpoint

    try:
        checkpoint = open_checkpoint(entry.key, store=open_store_of(entry.key, policy))
    except MedusaError as error:  # a store that does not answer proves nothing about its objects
        send(channel, "failed", {"message": str(error)})
        return 0
    index = entry.region.wait_index()
    same = checkpoint.index.shards == index.shards
    same = same and all(entry.region.file(name) == body for name, body in checkpoint.files.items())
    send(channel, "same" if same else "changed")
    return 0
