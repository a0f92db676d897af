"""A command whose descendants all end with it, or when this process's parent dies: ``python -m … COMMAND…``.

The kernel kills a child with its parent (PR_SET_PDEATHSIG), but not the child's children. So some of Ray's processes
would outlive a node server that is killed. This process becomes the parent of all orphans below it, and kills them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from medusa_runtime.process import adopt_orphans, children, die_with_parent, kill_children

_GRACE_S = 4.0  # for the command to end its own processes
WAITED_FOR = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


def main(command: Sequence[str]) -> int:
    """Run a command, and return its exit status as a shell does. 128 + the signal if a signal ended this process."""
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
    adopt_orphans()
    if parent == 1:  # the parent has gone already
        return 128 + signal.SIGTERM
    die_with_parent(parent, signal.SIGTERM)
    ours = os.getpid()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED_FOR)
        die_with_parent(ours)

    process = subprocess.Popen(command, preexec_fn=prepare)
    while True:
        received = signal.sigwait(WAITED_FOR)
        if received != signal.SIGCHLD:
            # Once the parent is dead, the keeper may kill what is left at any moment. Ray's GCS, killed just after its
            # raylet has unregistered, has stored that the node is dead, but not that the node's actors are. When it
            # starts again, it takes them for alive and never replaces them.
            if os.getppid() == parent:
                with suppress(ProcessLookupError):
                    process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_S)
            end_children()
            return 128 + received
        if process.poll() is not None:
            end_children()
            return process.returncode if process.returncode >= 0 else 128 - process.returncode
        reap_orphans({process.pid})


def reap_orphans(ours: set[int]) -> None:
    """Collect the exit status of ended children other than ``ours``, that is, of orphans, so that no zombies remain."""
    for pid in children() - ours:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def end_children() -> None:
    """Kill this process's children, and the orphans that they leave to it, until there are none."""
    while kill_children():
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
