"""The launcher of a program in a node: ``python -m medusa_cluster.lab.launcher NODE_PID FOLDER CGROUPS PROGRAM…``.

The launcher stays outside the node, passes signals on, and ends as the program ended. If it is killed, so is the
program.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from . import kernel

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main(arguments: Sequence[str]) -> int:
    node, folder, cgroups, *command = arguments
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    allowed, allow = os.pipe()
    try:
        groups = [os.open(Path(group) / "cgroup.procs", os.O_WRONLY) for group in cgroups.split(":") if group]
        kernel.enter(int(node), kernel.NODE)
        child = os.fork()
    except OSError as error:
        print(f"the node cannot be entered: {error}", file=sys.stderr)
        return 125
    if not child:
        os.close(allow)
        _execute(command, folder, allowed, before)
    for group in groups:
        os.write(group, str(child).encode())
    for passed_on in _PASSED_ON:
        signal.signal(passed_on, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.write(allow, b".")
    # Readers of the program's output must notice when the program closes it, so the launcher closes its own copies.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    return status


def _execute(command: list[str], folder: str, allowed: int, signals: set[signal.Signals] | set[int]) -> NoReturn:
    try:
        kernel.die_with_parent()
        if not os.read(allowed, 1):
            os._exit(1)
        os.setsid()  # in the node: a session from outside would have no id in its namespace
        os.chdir(folder)
        kernel.restore_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    os._exit(127)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
