"""Follow a start from the supervisor: the events that a terminal shows until the first token."""

from __future__ import annotations

import os
from typing import Protocol

from ..region.reader import Progress, Region
from ..timeline import Stage, Timeline


class Observer(Protocol):
    """Follows a start. It is called in the supervisor, at most a few times a second."""

    def bound(self, url: str) -> None:
        """Called when the function's address accepts connections."""

    def progress(self, progress: Progress) -> None:
        """Called with the progress of the fetch."""

    def ready(self, stages: list[Stage]) -> None:
        """Called when the model and the handler, those that there are, are loaded."""

    def first_token(self, stages: list[Stage]) -> None:
        """Called when the first token has been generated. No call follows."""


class StartReport:
    """Reads the timeline and the region for an observer, and calls it once for each event."""

    def __init__(self, observer: Observer | None, timeline: Timeline, *, has_handler: bool) -> None:
        self._observer = observer
        self._timeline = timeline
        self._has_handler = has_handler
        self._seen: set[str] = set()
        self._timeline_bytes = 0

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to report."""
        return self._observer is None or "first_token" in self._seen

    def bound(self, url: str) -> None:
        if self._observer is not None:
            self._observer.bound(url)

    def update(self, region: Region | None) -> None:
        """Report what has happened since the last call."""
        if self._observer is None or self.is_over:
            return
        size = os.fstat(self._timeline.fd).st_size
        if size != self._timeline_bytes:
            self._timeline_bytes = size
            stages = self._timeline.stages()
            names = {stage.name for stage in stages}
            for name, report in (("ready", self._observer.ready), ("first_token", self._observer.first_token)):
                if name == "ready" and self._has_handler and "handler" not in names:
                    continue
                if name in names and name not in self._seen:
                    self._seen.add(name)
                    report(stages)
        if region is not None and "ready" not in self._seen:
            self._observer.progress(region.progress())
