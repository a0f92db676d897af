"""The agent's child processes. Each has a connection with the agent, by whose end either sees that the other ended."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..errors import MedusaError, NodeError
from ..liveness import Verdict, Watch
from ..process import ReportPipe, fork
from ..process_limits import as_limit_error, most_files
from ..region.pages import unmap_memfds
from ..timeline import Timeline
from .messages import channel_pair

logger = logging.getLogger(__name__)

_TRIES, _RETRY_S = 20, 0.001  # a process's connections are closed a moment before it can be reaped
_WAIT_S = 5.0


class Child(NamedTuple):
    """A running child, and the agent's end of the connection with it."""

    pid: int
    channel: socket.socket


def start_child(
    name: str, body: Callable[[socket.socket, Timeline], int], *, timeline: Timeline, reports: ReportPipe
) -> Child:
    """Fork a child that runs ``body`` with its end of the connection.

    Raises LimitError or NodeError if no process can be started. The caller must have a single thread.
    """
    try:
        mine, theirs = channel_pair()
    except OSError as error:
        raise as_node_error(f"start a {name} process", error) from None
    try:
        pid = fork(name, lambda timeline: body(theirs, timeline), timeline=timeline, reports=reports)
    except OSError as error:
        mine.close()
        raise as_node_error(f"start a {name} process", error) from None
    finally:
        theirs.close()
    mine.setblocking(False)
    return Child(pid, mine)


def as_node_error(action: str, error: OSError) -> MedusaError:
    """Return the error of an agent that cannot do ``action`` because of an OSError: a limit's, or else a NodeError."""
    return as_limit_error(error) or NodeError(f"the node agent cannot {action}: {error.strerror}")


def close_others(*keep: int) -> None:
    """In a forked child, close all other descriptors except the standard streams, and unmap all other regions.

    The end of a connection is seen only once no process holds it any more, and a region's memory is free only once no
    process maps it. Python objects that own the closed descriptors must stay referenced, or they would close the same
    numbers a second time.
    """
    kept = {0, 1, 2, *keep}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:  # it takes a descriptor, too, and none is left
        any(_close(number) for number in range(most_files()) if number not in kept)
        names = os.listdir("/proc/self/fd")
    for descriptor in map(int, names):
        if descriptor not in kept:
            _close(descriptor)
    unmap_memfds({os.fstat(descriptor).st_ino for descriptor in keep})  # it opens a file


def _close(descriptor: int) -> bool:
    """Close a descriptor; False where there is none, as the one by which they were listed."""
    try:
        os.close(descriptor)
    except OSError:
        return False
    return True


class HungChildren:
    """Finds the agent's processes that hang, by their heartbeats and what the kernel says (``liveness.Watch``)."""

    def __init__(self) -> None:
        self._watches: dict[int, Watch] = {}

    def find_hung(self, beats: Mapping[int, Callable[[], int]]) -> dict[int, str]:
        """Return the processes that hang, each with the reason. Call it at least once a second, with all processes.

        ``beats`` maps each process id to a function that returns the time of its last heartbeat. For a process without
        heartbeats, because it may wait for hours, pass ``time.monotonic_ns``: then it hangs only if it was stopped
        (SIGSTOP).
        """
        self._watches = {pid: self._watches.get(pid) or Watch(pid, 0, beat_ns) for pid, beat_ns in beats.items()}
        return {pid: watch.reason for pid, watch in self._watches.items() if watch.look() is Verdict.HUNG}


def exit_status(child: Child) -> int | None:
    """Return the exit status of a child whose connection has ended, without reaping it; None if it still runs.

    It is minus the signal's number if a signal has ended it.
    """
    for _ in range(_TRIES):
        if (ended := os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        time.sleep(_RETRY_S)
    return None


def _ignore() -> None: ...


class Reaper:
    """Children that are about to end. The agent's loop does not wait for them: a killed one needs a CPU to die."""

    def __init__(self) -> None:
        self._ending: list[tuple[int, Callable[[], None]]] = []

    def kill(self, child: Child, on_end: Callable[[], None] = _ignore) -> None:
        """Kill a child, whatever it is doing. ``on_end`` is called when it has ended.

        That may be much later: the kernel does not kill a process that waits for an answer of a caller's file system.
        """
        child.channel.close()
        os.kill(child.pid, signal.SIGKILL)  # it has not been reaped, so no other process can have its number
        self._ending.append((child.pid, on_end))

    def add(self, pid: int) -> None:
        """Note a child that ends by itself."""
        self._ending.append((pid, _ignore))

    def reap(self) -> None:
        """Reap those that have ended. Call it now and then."""
        ending, self._ending = self._ending, []
        for pid, on_end in ending:
            if os.waitpid(pid, os.WNOHANG)[0]:
                on_end()
            else:
                self._ending.append((pid, on_end))

    def wait(self) -> None:
        """Wait for all of them to end, for a while, and reap them."""
        deadline = time.monotonic() + _WAIT_S
        while self._ending and time.monotonic() < deadline:
            self.reap()
            time.sleep(_RETRY_S)
        if self._ending:
            found = ", ".join(str(pid) for pid, _ in self._ending)
            logger.warning("killed, but not ended: %s; they may wait for a file system that does not answer", found)


REAPER = Reaper()  # the children of this process
