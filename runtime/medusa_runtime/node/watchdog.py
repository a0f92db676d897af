"""A watchdog that ends a process whose loop hangs, so that a service manager can start it again."""

from __future__ import annotations

import logging
import os
import signal
import time
import traceback
from types import FrameType

logger = logging.getLogger(__name__)

_EVERY_S = 1.4  # a hang is noticed at the second check, and the process has ended 3 s after it began
_MOST_MISSED = 2
_LATE = 1.25  # times the time between two checks
STATUS = 70  # EX_SOFTWARE of sysexits.h


class Watchdog:
    """Checks now and then whether the loop goes on. If it has not for the second time, the process ends.

    A check counts only if the process could have run for half of the time between two checks. It could not if it waited
    for a CPU. And one that has waited for long may find one alarm waiting, and get the next one a moment later. A check
    that comes late is the first one of a process that was stopped (by SIGSTOP, or with the machine), and now goes on.
    """

    def __init__(self, what: str = "the node agent", every_s: float | None = None) -> None:
        """``what`` is the process's name for the log. ``every_s`` is the time between two checks, 1.4 s by default."""
        self._what = what
        self._every_s = every_s or _EVERY_S
        self._missed = 0
        self._checked_s = 0.0  # ``could_run_s`` at the last check

    def start(self) -> None:
        """Start to watch. Call it in the main thread. Children do not inherit the timer."""
        self._checked_s = could_run_s()
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.setitimer(signal.ITIMER_REAL, self._every_s, self._every_s)

    def beat(self) -> None:
        """Note that the loop goes on."""
        self._missed = 0

    def _on_alarm(self, _: int, frame: FrameType | None) -> None:
        before_s, self._checked_s = self._checked_s, could_run_s()
        passed_s = self._checked_s - before_s
        if passed_s < self._every_s / 2:
            return
        self._missed = 1 if passed_s > _LATE * self._every_s else self._missed + 1
        if self._missed >= _MOST_MISSED:
            where = "".join(traceback.format_stack(frame))
            logger.critical("%s has hung for %g s and ends; it was here:\n%s", self._what, self._every_s, where)
            os._exit(STATUS)

    def close(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def could_run_s() -> float:
    """Return the time (CLOCK_MONOTONIC) without that in which this process's first thread has waited for a CPU."""
    try:
        with open("/proc/self/schedstat", "rb") as file:
            return time.monotonic() - int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):  # the kernel does not count it
        return time.monotonic()
