"""A process that runs beside the agent for as long as it runs, such as the server of its metrics."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from ..errors import MedusaError
from ..process import ReportPipe
from ..timeline import Timeline
from .child import REAPER, Child, close_others, start_child
from .event_loop import EventLoop

logger = logging.getLogger(__name__)

_AGAIN_AFTER_S = 1.0


class Companion(NamedTuple):
    """What to run beside the agent: ``run``, in a child that keeps the descriptor ``fd``. It should not return."""

    name: str
    fd: int
    run: Callable[[], int]


class CompanionProcess:
    """The process of a companion. One that ends is started again."""

    def __init__(self, companion: Companion, *, timeline: Timeline, reports: ReportPipe, loop: EventLoop) -> None:
        self._companion = companion
        self._timeline = timeline
        self._reports = reports
        self._loop = loop
        self._child: Child | None = None
        self._next_at = 0.0

    def tick(self) -> None:
        """Start the process if there is none."""
        if self._child is not None or time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + _AGAIN_AFTER_S
        try:
            self._child = start_child(self._companion.name, self._run, timeline=self._timeline, reports=self._reports)
        except MedusaError as error:
            logger.warning("%s", error)
            return
        self._loop.watch(self._child.channel, self._on_end)

    def _run(self, channel: socket.socket, timeline: Timeline) -> int:
        close_others(channel.fileno(), self._companion.fd, timeline.fd, self._reports.write_fd)
        return self._companion.run()

    def _on_end(self) -> None:
        logger.warning("the %s process has ended; starting it again", self._companion.name)
        self.close()

    def close(self) -> None:
        if self._child is not None:
            self._loop.unwatch(self._child.channel)
            REAPER.kill(self._child)
            self._child = None
