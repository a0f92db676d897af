"""The child processes of an instance: forked by name, reaped, and ended with all processes they have started."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from ..container_limits import OutOfMemory
from ..process import ReportPipe, fork
from ..timeline import Timeline

logger = logging.getLogger(__name__)

_END_S = 2.0  # how long processes have to end after SIGTERM
_KILLED_S = 5.0  # and after SIGKILL; the kernel does not kill one that waits for some file systems (FUSE)
_LOOK_S = 0.01


class Ended(NamedTuple):
    """A child that has ended.

    ``status`` is its exit status, or minus the number of the signal that ended it. ``how`` says the same in words.
    """

    name: str
    status: int
    how: str


class Children:
    """The running children, each of which leads a process group of its own."""

    def __init__(self, timeline: Timeline, reports: ReportPipe) -> None:
        self._timeline = timeline
        self._reports = reports
        self._names: dict[int, str] = {}
        self.out_of_memory = OutOfMemory()

    def fork(self, name: str, body: Callable[[Timeline], int]) -> None:
        """Run ``body`` in a child. What it returns is the child's exit status."""
        self._names[fork(name, body, timeline=self._timeline, reports=self._reports)] = name

    def pid(self, name: str) -> int:
        """Return the process id of the child of this name; 0 while there is none."""
        return next((pid for pid, found in self._names.items() if found == name), 0)

    def stop(self, name: str) -> None:
        """Send SIGTERM to a child, if there is one of this name. Safe in a signal handler."""
        if pid := self.pid(name):
            with suppress(ProcessLookupError):  # the child has just ended, and is about to be reaped
                os.kill(pid, signal.SIGTERM)

    def kill(self, name: str) -> bool:
        """Kill a child together with its own children, and return whether there was one of this name."""
        pid = self.pid(name)
        if pid:
            _signal_group(pid, signal.SIGKILL)
            deadline = time.monotonic() + _KILLED_S
            while not os.waitpid(pid, os.WNOHANG)[0]:
                if time.monotonic() > deadline:
                    why = "it may wait for a file system that does not answer"
                    logger.warning("the %s (process %d) was killed and has not ended; %s", name, pid, why)
                    break
                time.sleep(_LOOK_S)
            del self._names[pid]
        return pid != 0

    def reap(self) -> list[Ended]:
        """Return the children that have ended since the last call."""
        ended = []
        for pid in tuple(self._names):
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                code = os.waitstatus_to_exitcode(status)
                ended.append(Ended(self._names.pop(pid), code, self.out_of_memory.how(code)))
        if os.getpid() == 1:
            self._reap_orphans()
        return ended

    def _reap_orphans(self) -> None:
        """Reap orphans, as a container's init process must."""
        try:
            while (orphan := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if orphan.si_pid in self._names:
                    break
                os.waitpid(orphan.si_pid, os.WNOHANG)
        except ChildProcessError:
            pass

    def close(self) -> None:
        """End all children, first with SIGTERM and then with SIGKILL, and wait for them."""
        for pid in self._names:
            _signal_group(pid, signal.SIGTERM)
        deadline = time.monotonic() + _END_S
        while self._names and time.monotonic() < deadline:
            self.reap()
            time.sleep(_LOOK_S)
        for name in tuple(self._names.values()):
            self.kill(name)


def _signal_group(pid: int, number: int) -> None:
    for send in (os.killpg, os.kill):
        try:
            send(pid, number)
        except ProcessLookupError:
            pass
