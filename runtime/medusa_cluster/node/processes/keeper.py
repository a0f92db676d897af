"""The parent of a node server: starts it again when it was killed or hangs.

It imports next to nothing and does nothing else, so that little can go wrong with it.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress

from medusa_runtime.limits import OutOfMemory
from medusa_runtime.node.watchdog import STATUS as HUNG
from medusa_runtime.process import die_with_parent

from .guard import WAITED_FOR, adopt_orphans, end_children, reap_orphans
from .stopped import StoppedProcesses

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_SHORTEST_S, _LONGEST_S, _STABLE_S = 0.2, 10.0, 30.0  # pauses before a start; after so long a run the shortest
_ASKED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def keep() -> int | None:
    """Fork a child that is to run the node server. Returns None in the child, and in the parent its exit status.

    A child that was killed, or whose watchdog has ended it, is replaced by another one, once all that it had started is
    gone. Signals that ask the parent to end are passed on. The child is in a process group of its own, so that Ctrl-C
    in a terminal reaches it once.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
    adopt_orphans()
    out_of_memory, pause_s = OutOfMemory(), _SHORTEST_S
    while True:
        began, ours = time.monotonic(), os.getpid()
        out_of_memory.look()
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            die_with_parent(ours)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED_FOR)
            return None
        status, asked = _follow(child)
        end_children()
        if -status in _ASKED or (asked and status < 0):
            return 128 - status
        if status >= 0 and status != HUNG:
            return status
        logger.error("the node server ended (%s); starting it again", out_of_memory.how(status))
        pause_s = _SHORTEST_S if time.monotonic() - began > _STABLE_S else min(pause_s * 2, _LONGEST_S)
        if _asked_within(pause_s):
            return 128 + signal.SIGTERM


def _follow(child: int) -> tuple[int, bool]:
    """Wait for the child's end; its exit status, negative for a signal, and whether it was asked to end."""
    stopped, asked = StoppedProcesses(lambda: [child]), False
    while True:
        received = signal.sigtimedwait(WAITED_FOR, _LOOK_S)
        if received is not None and received.si_signo in _ASKED:
            asked = True
            with suppress(ProcessLookupError):
                os.kill(child, received.si_signo)
        stopped.look()
        reap_orphans({child})
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), asked


def _asked_within(seconds: float) -> bool:
    return signal.sigtimedwait(_ASKED, seconds) is not None
