"""A child process of the agent, and the connection with it: when either ends, the other is told by the kernel."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..errors import NodeError
from ..process import ReportPipe, fork
from ..resource_limits import as_limit_error
from ..timeline import Timeline
from .messages import pair

STOPPED_S = 1.5


class Child(NamedTuple):
    pid: int
    channel: socket.socket


def start_child(
    name: str, body: Callable[[socket.socket, Timeline], int], *, timeline: Timeline, reports: ReportPipe
) -> Child:
    """``body`` is given its end of the connection. Raises LimitError or NodeError where there is no room for a process.

    The caller must have a single thread.
    """
    try:
        mine, theirs = pair()
    except OSError as error:
        raise _cannot(name, error) from None
    try:
        pid = fork(name, lambda timeline: body(theirs, timeline), timeline=timeline, reports=reports)
    except OSError as error:
        mine.close()
        raise _cannot(name, error) from None
    finally:
        theirs.close()
    mine.setblocking(False)
    return Child(pid, mine)


def _cannot(name: str, error: OSError) -> Exception:
    return as_limit_error(error) or NodeError(f"the node agent cannot start a {name} process: {error.strerror}")


def end_first() -> None:
    """Let the kernel end this process before the agent, where the machine or the container runs out of memory."""
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("900")
    except OSError:
        pass  # a kernel or a sandbox without it


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped (SIGSTOP), and so does nothing; false of one that only waits."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] == b"T"
    except OSError:
        return False


class Stopped:
    """Which processes have been stopped for so long that nobody should wait for them any more.

    Only a stop counts as a hang. A process that is slow, starved of CPU or in a long import is left alone.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def look(self, pids: Iterable[int]) -> list[int]:
        """Call it at least once a second with all processes of interest."""
        now = time.monotonic()
        self._since = {pid: self._since.get(pid, now) for pid in pids if is_stopped(pid)}
        return [pid for pid, since in self._since.items() if now - since >= STOPPED_S]


def end_child(child: Child) -> None:
    """Kill it, whatever it is doing. The caller reaps it."""
    child.channel.close()
    os.kill(child.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
