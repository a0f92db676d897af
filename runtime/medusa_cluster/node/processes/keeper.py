"""The keeper: the parent of a node server, which starts it again when it was killed or hangs.

The keeper imports next to nothing and does nothing else, so that little can go wrong with it. The node server watches
the keeper in turn. If the keeper is killed, the kernel ends the node server and everything that it has started.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress

from medusa_runtime.container_limits import OutOfMemory
from medusa_runtime.liveness import Heartbeats, Verdict, Watch, is_stopped
from medusa_runtime.node.watchdog import STATUS as HUNG
from medusa_runtime.process import adopt_orphans, die_with_parent

from .guard import WAITED_FOR, end_children, reap_orphans
from .stopped import StoppedProcesses

logger = logging.getLogger(__name__)

_POLL_S = 0.25
# The pause before a start doubles from the shortest to the longest, and is the shortest again after a stable run.
_SHORTEST_S, _LONGEST_S, _STABLE_S = 0.2, 10.0, 30.0
_ASKED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_ROLE = "supervisor"  # the keeper's role in the heartbeats


class KeeperWatch:
    """A watch over the keeper, for the node server, which is the keeper's child."""

    def __init__(self, heartbeats: Heartbeats) -> None:
        self._pid = os.getppid()
        self._watch = Watch(self._pid, 0, lambda: heartbeats.beat_ns(_ROLE))

    def check(self) -> bool:
        """Return whether the keeper works. Continues it if it was stopped. Call this a few times a second."""
        if self._watch.look() is not Verdict.HUNG:
            return True
        stopped = is_stopped(self._pid)
        what = "continuing it" if stopped else "ending this node, which nobody would start again"
        logger.error("the keeper of the node server (process %d): %s; %s", self._pid, self._watch.reason, what)
        if stopped:
            os.kill(self._pid, signal.SIGCONT)
        return stopped

    def end(self) -> None:
        """Kill the keeper, so that the platform notices. The kernel ends this process with it."""
        os.kill(self._pid, signal.SIGKILL)


def keep() -> int | KeeperWatch:
    """Fork a child to run the node server. Returns a ``KeeperWatch`` in the child, and its exit status in the parent.

    A child that was killed, or whose watchdog ended it, is replaced by a new one, once everything it had started is
    gone. Signals that ask the parent to end are passed on to the child. The child has a process group of its own, so
    Ctrl-C in a terminal does not reach it a second time. Raises OSError if the first child cannot be forked.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
    adopt_orphans()
    out_of_memory, heartbeats, pause_s = OutOfMemory(), Heartbeats(), _SHORTEST_S
    heartbeats.enter(_ROLE)
    failed = False
    while True:
        began, ours = time.monotonic(), os.getpid()
        out_of_memory.look()
        try:
            child = os.fork()
        except OSError as error:  # out of memory or processes at this moment, perhaps as the last one was
            if not failed:
                raise
            logger.error("the node server cannot be started: %s; trying again", error)  # noqa: TRY400
            pause_s = min(pause_s * 2, _LONGEST_S)
            if _asked_within(pause_s):
                return 128 + signal.SIGTERM
            continue
        if not child:
            os.setpgid(0, 0)
            die_with_parent(ours)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED_FOR)
            return KeeperWatch(heartbeats)
        status, asked = _follow(child, heartbeats)
        end_children()
        if -status in _ASKED or (asked and status < 0):
            return 128 - status
        if status >= 0 and status != HUNG:
            return status
        failed = True
        logger.error("the node server ended (%s); starting it again", out_of_memory.how(status))
        pause_s = _SHORTEST_S if time.monotonic() - began > _STABLE_S else min(pause_s * 2, _LONGEST_S)
        if _asked_within(pause_s):
            return 128 + signal.SIGTERM


def _follow(child: int, heartbeats: Heartbeats) -> tuple[int, bool]:
    """Wait until the child ends. Return its exit status, negative for a signal, and whether it was asked to end."""
    stopped, asked = StoppedProcesses(lambda: [child]), False
    while True:
        heartbeats.beat(_ROLE)
        received = signal.sigtimedwait(WAITED_FOR, _POLL_S)
        if received is not None and received.si_signo in _ASKED:
            asked = True
            with suppress(ProcessLookupError):
                os.kill(child, received.si_signo)
        stopped.check()
        reap_orphans({child})
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), asked


def _asked_within(seconds: float) -> bool:
    return signal.sigtimedwait(_ASKED, seconds) is not None
