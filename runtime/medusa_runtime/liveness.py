"""Heartbeats of an instance's processes, and what the kernel says about a process that has stopped beating.

Every process enters itself into a page of shared memory and renews the time of its last heartbeat there. A late
heartbeat alone proves nothing: the process may be waiting for a CPU, importing, or running user code that holds the
interpreter's lock. So a silent process is judged by /proc as well. It counts as hung when

- the kernel has stopped it (SIGSTOP or job control; not a debugger) for STOPPED_S, or
- for SILENT_S it gave no heartbeat, used no CPU time and had no thread that wants a CPU: a deadlock.

Time is counted from look to look, and each look counts for a second at most. A suspended machine or a paused container
stops the watcher too, so it makes no process look hung.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from enum import Enum

logger = logging.getLogger(__name__)

LOOK_S = 0.5  # the time between two looks, and between two heartbeats
STOPPED_S = 1.5
RESUME_EVERY_S = 60.0
SUSPECT_SILENT_S, SILENT_S = 10.0, 60.0
_LONGEST_LOOK_S = 1.0
ROLES = ("supervisor", "function", "worker", "zygote", "engine", "prefetcher")
_PID, _BEAT_NS, _RESTARTS, _HUNG = range(4)
_ROW = 4  # words


class Heartbeats:
    """One page that the processes of an instance share, with a row for each role.

    It is made before the processes are forked. Each write stores one word, so no lock is needed.
    """

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")

    def enter(self, role: str) -> None:
        """Make the calling process the one of this role. It counts as a restart if another process had the role."""
        row = ROLES.index(role) * _ROW
        if self._words[row + _PID] not in (0, os.getpid()):
            self._words[row + _RESTARTS] += 1
        self._words[row + _PID] = os.getpid()
        self._words[row + _HUNG] = 0
        self.beat(role)

    def beat(self, role: str) -> None:
        self._words[ROLES.index(role) * _ROW + _BEAT_NS] = time.monotonic_ns()

    def keep(self, role: str) -> None:
        """Enter the calling process, and beat in a thread until the process ends or another one enters this role."""
        self.enter(role)
        threading.Thread(target=self._keep, args=(role, os.getpid()), name="heartbeat", daemon=True).start()

    def _keep(self, role: str, pid: int) -> None:
        while self.pid(role) == pid:
            self.beat(role)
            time.sleep(LOOK_S)

    def leave(self, role: str) -> None:
        """Note that the process of this role has ended as it should, so that it is no longer watched."""
        self._words[ROLES.index(role) * _ROW + _PID] = 0

    def pid(self, role: str) -> int:
        """Return the id of this role's process; 0 while there is none in this instance."""
        return self._words[ROLES.index(role) * _ROW + _PID]

    def beat_ns(self, role: str) -> int:
        return self._words[ROLES.index(role) * _ROW + _BEAT_NS]

    def age_s(self, role: str) -> float:
        """Return the seconds since the last heartbeat."""
        return max(time.monotonic_ns() - self.beat_ns(role), 0) / 1e9

    def restarts(self, role: str) -> int:
        return self._words[ROLES.index(role) * _ROW + _RESTARTS]

    def mark_hung(self, role: str, hung: bool) -> None:
        """Note whether the process of this role fails to run at present. Probes name such processes."""
        self._words[ROLES.index(role) * _ROW + _HUNG] = hung

    def hung(self) -> list[str]:
        """Return the roles whose processes do not run at present."""
        return [role for number, role in enumerate(ROLES) if self._words[number * _ROW + _HUNG]]


class Verdict(Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"  # it does not run; it may go on in a moment
    HUNG = "hung"


class Watch:
    """Judges one process, a look at a time.

    ``beat_ns`` returns the time of its last heartbeat. ``parent`` is the id of its parent: a process with another
    parent has only got the same id later. With 0, any parent is accepted, and ``kill`` does nothing.
    """

    def __init__(self, pid: int, parent: int, beat_ns: Callable[[], int]) -> None:
        self.pid = pid
        self.reason = ""
        self._parent = parent
        self._beat_ns = beat_ns
        self._seen: tuple[int, int] | None = None  # the last heartbeat, and the ticks of CPU time used
        self._looked = time.monotonic()
        self._stopped_looks = 0
        self._stopped_s = self._silent_s = 0.0
        self._resumed = -math.inf

    def look(self) -> Verdict:
        now = time.monotonic()
        passed_s, self._looked = min(now - self._looked, _LONGEST_LOOK_S), now
        stat = _stat(self.pid)
        if stat is None or self._parent not in (0, int(stat[1])):
            return Verdict.ALIVE  # it has ended: its parent replaces it
        if stat[0] == b"T":
            return self._stopped(passed_s)
        self._stopped_looks, self._stopped_s = 0, 0.0
        seen = self._beat_ns(), int(stat[11]) + int(stat[12])
        if seen != self._seen or stat[0] in b"tZX" or _wants_cpu(self.pid):
            self._seen, self._silent_s = seen, 0.0
            return Verdict.ALIVE
        self._silent_s += passed_s
        self.reason = f"it gave no sign of life and used no CPU for {self._silent_s:.0f} s"
        if self._silent_s >= SILENT_S:
            return Verdict.HUNG
        return Verdict.SUSPECT if self._silent_s >= SUSPECT_SILENT_S else Verdict.ALIVE

    def _stopped(self, passed_s: float) -> Verdict:
        self._stopped_looks += 1
        if self._stopped_looks > 1:
            self._stopped_s += passed_s
        self.reason = f"it has been stopped (SIGSTOP) for {self._stopped_s:.1f} s"
        if self._stopped_s >= STOPPED_S:
            return Verdict.HUNG
        return Verdict.SUSPECT if self._stopped_looks > 1 else Verdict.ALIVE

    def resume(self) -> bool:
        """Continue a stopped process (SIGCONT). Return False if it was continued just before, too."""
        now = time.monotonic()
        stat = _stat(self.pid)
        if stat is None or int(stat[1]) != self._parent or stat[0] != b"T" or now - self._resumed < RESUME_EVERY_S:
            return False
        self._resumed = now
        os.kill(self.pid, signal.SIGCONT)
        return True

    def kill(self) -> None:
        """Kill the process (SIGKILL), unless it has already ended."""
        stat = _stat(self.pid)
        if stat is not None and int(stat[1]) == self._parent:
            os.kill(self.pid, signal.SIGKILL)


class Watchdog:
    """Watches processes by role, marks those that do not run, and kills hung ones so that they are replaced."""

    def __init__(self, heartbeats: Heartbeats) -> None:
        self._heartbeats = heartbeats
        self._watches: dict[str, Watch] = {}
        self._next = 0.0

    def look(self, role: str, pid: int, parent: int, *, resume: bool = False) -> None:
        """Judge the process of a role. Call it about every LOOK_S for each role.

        ``pid`` is the process that has the role now, or 0 for none. ``parent`` is as in ``Watch``. With ``resume``, a
        process that was stopped is continued, and killed only if it is stopped again within RESUME_EVERY_S.
        """
        watch = self._watches.get(role)
        if watch is None or watch.pid != pid:
            if pid:
                self._watches[role] = Watch(pid, parent, lambda: self._heartbeats.beat_ns(role))
            elif watch is not None:
                del self._watches[role]
            if watch is not None:
                self._heartbeats.mark_hung(role, False)
            return
        verdict = watch.look()
        self._heartbeats.mark_hung(role, verdict is not Verdict.ALIVE)
        if verdict is Verdict.HUNG and parent and resume and watch.resume():
            logger.warning("the %s process (%d) hangs: %s; continuing it", role, pid, watch.reason)
        elif verdict is Verdict.HUNG and parent:
            logger.error("the %s process (%d) hangs: %s; killing it", role, pid, watch.reason)
            watch.kill()

    def due(self) -> bool:
        """Return whether about LOOK_S have passed since this method last returned True."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + LOOK_S * 0.9
        return True


def is_stopped(pid: int) -> bool:
    """Return whether a process has been stopped by a signal (SIGSTOP). One that only waits has not."""
    stat = _stat(pid)
    return stat is not None and stat[0] == b"T"


def _stat(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat behind the process's name, state first; None when it cannot be read."""
    return _fields(f"/proc/{pid}/stat")


def _wants_cpu(pid: int) -> bool:
    """Return whether any thread of the process is running or waits for a CPU."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return any((stat := _fields(f"/proc/{pid}/task/{task}/stat")) is not None and stat[0] == b"R" for task in tasks)


def _fields(path: str) -> list[bytes] | None:
    try:
        with open(path, "rb") as stat:
            return stat.read().rpartition(b")")[2].split()
    except OSError:
        return None


__all__ = ["LOOK_S", "ROLES", "Heartbeats", "Verdict", "Watch", "Watchdog", "is_stopped"]
