"""The timeline: what each process of a cold start did, and when.

It is an append-only memfd that every process of an instance inherits. A finished stage is one JSON line, written with a
single ``write`` (the kernel serializes appends). Times are those of CLOCK_MONOTONIC, which all processes share.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

_IDLE_NS = 200_000_000
_MOST_BYTES = 1 << 20  # thousands of stages; a start has fewer than a thousand


class Stage(NamedTuple):
    """One stage of a start, in nanoseconds of CLOCK_MONOTONIC. A mark has ``start_ns == end_ns``."""

    name: str
    process: str
    start_ns: int
    end_ns: int
    detail: dict[str, Any]


class Timeline:
    """Appends stages under the name of one process. ``fd`` may be inherited by or passed to another process."""

    def __init__(self, fd: int, process: str) -> None:
        self.fd = fd
        self.process = process

    @classmethod
    def create(cls, process: str) -> Timeline:
        """Create an empty timeline."""
        fd = os.memfd_create("medusa-timeline", os.MFD_CLOEXEC)
        # The kernel does not lock a memfd's file position: without O_APPEND, processes would overwrite each other.
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
        return cls(fd, process)

    def named(self, process: str) -> Timeline:
        """Return the same timeline, written to under another process's name."""
        return Timeline(self.fd, process)

    def close(self) -> None:
        """Close the descriptor, which this object shares with those of ``named``."""
        os.close(self.fd)

    @contextmanager
    def stage(self, name: str, **detail: Any) -> Iterator[dict[str, Any]]:
        """Record the body as one stage, also if it raises. The body may add details to the yielded dict."""
        start = time.monotonic_ns()
        try:
            yield detail
        finally:
            self.record(name, start, time.monotonic_ns(), **detail)

    def mark(self, name: str, **detail: Any) -> None:
        """Record a moment: a stage that takes no time."""
        now = time.monotonic_ns()
        self.record(name, now, now, **detail)

    def record(self, name: str, start_ns: int, end_ns: int, **detail: Any) -> None:
        """Append a stage that has ended, unless the timeline is full: adapters that come and go add more and more."""
        if os.fstat(self.fd).st_size >= _MOST_BYTES:
            return
        line = json.dumps([name, self.process, start_ns, end_ns, detail], separators=(",", ":")) + "\n"
        os.write(self.fd, line.encode())

    def stages(self) -> list[Stage]:
        """Return all stages recorded so far, sorted by start time."""
        data = os.pread(self.fd, os.fstat(self.fd).st_size, 0)
        # A write that crosses a page can be seen before its end is there.
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        return sorted((Stage(*json.loads(line)) for line in lines), key=lambda stage: stage.start_ns)


def process_start_ns() -> int:
    """Return the time of CLOCK_MONOTONIC at which this process was created, to about 10 ms (the kernel's tick)."""
    with open("/proc/self/stat", "rb") as stat:
        ticks = int(stat.read().rpartition(b")")[2].split()[19])
    booted = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    return ticks * (10**9 // os.sysconf("SC_CLK_TCK")) - booted


def moment(stages: Sequence[Stage], name: str) -> int | None:
    """Return when the first stage of this name ended; None if it has not."""
    return min((stage.end_ns for stage in stages if stage.name == name), default=None)


def ready_at(stages: Sequence[Stage]) -> int | None:
    """Return when the instance was ready: its model was, and its handler had been loaded. None if it is not."""
    ready, loaded = moment(stages, "ready"), moment(stages, "handler")
    return ready if ready is None or loaded is None else max(ready, loaded)


def window(stages: Sequence[Stage]) -> tuple[int, int]:
    """Return start and end of the cold start, from its first stage to the later of first token and ready.

    If the first request came to an idle, ready instance, its token is not part of the start.
    """
    start = min(stage.start_ns for stage in stages)
    ready, token = ready_at(stages), moment(stages, "first_token")
    if ready is None or token is None:
        known = ready if token is None else token
        return start, max(stage.end_ns for stage in stages) if known is None else known
    if token > ready and _idle_after(stages, ready, token):
        return start, ready
    return start, max(ready, token)


def _idle_after(stages: Sequence[Stage], ready: int, token: int) -> bool:
    """Return whether the instance, once ready, had nothing to do for a while before its first token."""
    busy_until = ready
    for stage in sorted(stages, key=lambda stage: stage.start_ns):
        if stage.start_ns < stage.end_ns and stage.start_ns <= busy_until + _IDLE_NS:
            busy_until = max(busy_until, stage.end_ns)
    return token > busy_until + _IDLE_NS
