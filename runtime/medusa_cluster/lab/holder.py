"""The process that holds one node of the laboratory: ``python -m medusa_cluster.lab.holder LAB NAME FOLDER [CGROUP]``.

A node consists of namespaces that its first process holds (PID 1 of the node's process namespace). They have no names,
so when that process ends, the kernel removes them, with their interfaces and processes. The first process ends with
this holder, and the holder with the laboratory (the process LAB), however that ended. The holder then removes the
node's control group and folder, which the kernel would keep.

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
        pid, line = _fork(name, Path(folder), [Path(cgroup) for cgroup in cgroups])
        print(line, flush=True)
        if json.loads(line).get("pid"):
            select.select([laboratory, os.pidfd_open(pid)], [], [])
        return 0
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)  # returns after the kernel has ended all other processes of the node
        _remove(Path(folder), [Path(cgroup) for cgroup in cgroups])


def _fork(name: str, folder: Path, cgroups: Sequence[Path]) -> tuple[int, str]:
    """Start the node's first process. Return its pid and the line to print."""
    allowed, allow = os.pipe()
    reported_fd, report_fd = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(allow)
        os.close(reported_fd)
        _first_process(name, folder, allowed, report_fd)
    os.close(allowed)
    os.close(report_fd)
    for cgroup in cgroups:
        (cgroup / "cgroup.procs").write_text(str(pid))
    os.write(allow, b".")
    os.close(allow)
    with open(reported_fd) as pipe:
        failure = pipe.read()
    return pid, json.dumps({"error": failure} if failure else {"pid": pid})


def _first_process(name: str, folder: Path, allowed: int, report_fd: int) -> NoReturn:
    """Set up the node's mounts and hostname, then collect orphaned processes until killed."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        kernel.die_with_parent()
        if not os.read(allowed, 1):  # the holder has ended already
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
        os.write(report_fd, str(error).encode())
        os._exit(1)
    os.close(report_fd)
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        signal.sigwait({signal.SIGCHLD})


def _remove(folder: Path, cgroups: Sequence[Path]) -> None:
    """Remove the node's folder and control groups. The last node also removes those above them."""
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
