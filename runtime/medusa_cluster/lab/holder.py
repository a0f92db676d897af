"""The process that holds one node of the laboratory: ``python -m medusa_cluster.lab.holder LAB NAME FOLDER [CGROUP]``.

A node is what its first process (PID 1 of the node's own process namespace) holds. The namespaces have no names, so
the kernel removes them, their interfaces and every process in them when that process ends. It ends with this holder,
and the holder with the laboratory (process LAB), however that ended. The holder then removes the node's control group
and folder, which the kernel would keep.

It prints a JSON line: ``{"pid": first process}`` or ``{"error": text}``.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from . import kernel


def main(arguments: Sequence[str]) -> int:
    lab, name, folder, *cgroups = arguments
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    pid = 0
    try:
        laboratory = os.pidfd_open(int(lab))
        kernel.unshare(kernel.NODE)
        pid, said = _fork(name, Path(folder), [Path(cgroup) for cgroup in cgroups])
        print(said, flush=True)
        if json.loads(said).get("pid"):
            select.select([laboratory, os.pidfd_open(pid)], [], [])
        return 0
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)  # the kernel has ended the node's other processes before
        _remove(Path(folder), [Path(cgroup) for cgroup in cgroups])


def _fork(name: str, folder: Path, cgroups: Sequence[Path]) -> tuple[int, str]:
    """Start the node's first process; returns its pid and the line about it."""
    allowed, allow = os.pipe()
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(allow)
        os.close(told)
        _first_process(name, folder, allowed, tell)
    os.close(allowed)
    os.close(tell)
    for cgroup in cgroups:
        (cgroup / "cgroup.procs").write_text(str(pid))
    os.write(allow, b".")
    os.close(allow)
    with open(told) as pipe:
        failure = pipe.read()
    return pid, json.dumps({"error": failure} if failure else {"pid": pid})


def _first_process(name: str, folder: Path, allowed: int, tell: int) -> NoReturn:
    """Make the node's own places and then wait for the processes that lose their parents."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        kernel.die_with_parent()
        if not os.read(allowed, 1):  # the holder ended before that
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        kernel.set_hostname(name)
        kernel.make_mounts_private()
        kernel.mount("proc", "/proc")
        kernel.mount("tmpfs", "/dev/shm", "mode=1777")
        if os.path.exists("/etc/hosts"):
            kernel.bind(str(folder / "hosts"), "/etc/hosts")
        with open("/proc/self/comm", "w") as comm:
            comm.write(f"lab-{name}")
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
    except OSError as error:
        os.write(tell, str(error).encode())
        os._exit(1)
    os.close(tell)
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        signal.sigwait({signal.SIGCHLD})


def _remove(folder: Path, cgroups: Sequence[Path]) -> None:
    """Remove the node's folder and control groups, and those above them once the last node has removed its own."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()
    for cgroup in cgroups:
        for _ in range(50):  # a process that was killed may still be leaving the group
            try:
                cgroup.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.02)
        with suppress(OSError):
            cgroup.parent.rmdir()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
