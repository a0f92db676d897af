"""A watch that kills stopped processes (SIGSTOP), because others would wait for them for ever."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

_STOPPED_S = 1.5
_LONGEST_CHECK_S = 0.5


class StoppedProcesses:
    """A watch over processes, by default over all descendants of this one. It leaves alone what a debugger holds.

    Time is counted from check to check, and each counts for half a second at most: who stops a whole node stops this
    process, too, which is perhaps the first to go on.
    """

    def __init__(self, pids: Callable[[], list[int]] | None = None) -> None:
        self._pids = pids or descendants
        self._stopped_s: dict[int, float] = {}  # by pid, of those that were stopped at the last check
        self._checked = 0.0

    def check(self) -> None:
        """Kill the processes that were stopped at every check of the last 1.5 s."""
        before, self._checked = self._checked, time.monotonic()
        passed_s = min(self._checked - before, _LONGEST_CHECK_S)
        stopped = [pid for pid in self._pids() if state(pid) == "T"]
        self._stopped_s = {pid: self._stopped_s.get(pid, -passed_s) + passed_s for pid in stopped}
        for pid, stopped_s in self._stopped_s.items():
            if stopped_s > _STOPPED_S:
                logger.error(
                    "the process %d (%s) was stopped; killing it, so that it is started again", pid, _name(pid)
                )
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def descendants() -> list[int]:
    """Return the children of this process, their children, and so on."""
    found, pending = [], [os.getpid()]
    while pending:
        with suppress(OSError, ValueError):
            pid = pending.pop()
            children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            found += children
            pending += children
    return found


def state(pid: int) -> str:
    """Return the letter of a process's state, as in proc(5), or an empty string if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"
