"""What /proc tells of processes that a test has started, its zombies left out."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path


def alive(pid: int) -> bool:
    """Return whether it runs: a zombie has ended, once all its threads have. Until then its sockets are open."""
    try:
        return _state_and_parent(pid)[0] != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def stopped(pid: int) -> bool:
    """Whether SIGSTOP has it; false of one that has ended."""
    try:
        return _state_and_parent(pid)[0] == "T"
    except OSError:
        return False


def waited_s(pid: int) -> float:
    """The longest that any of its threads has waited for a CPU so far: what other programs have cost it."""
    waits = [0]
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            waits.append(int((task / "schedstat").read_text().split()[1]))
    return max(waits) / 1e9


class Unloaded:
    """Seconds since it was made, without those in which the watcher or this test waited for a CPU.

    So the time does not depend on what else the machine does. A watcher that has ended has waited for as long as the
    last call before its end found: call ``passed_s`` again and again while that is awaited.
    """

    def __init__(self, watcher: int) -> None:
        self._watcher, self._watcher_waited = watcher, 0.0
        self._began, self._waited = time.monotonic(), self._waits()

    def _waits(self) -> float:
        with contextlib.suppress(FileNotFoundError):
            self._watcher_waited = waited_s(self._watcher)
        return self._watcher_waited + waited_s(os.getpid())

    def passed_s(self) -> float:
        return time.monotonic() - self._began - (self._waits() - self._waited)


def open_files(pid: int) -> dict[int, str]:
    """The paths of a process's open files, by descriptor.

    Files of /proc and /sys are left out, because a process opens these only for a moment.
    """
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            file = os.readlink(f"/proc/{pid}/fd/{name}")
            if not file.startswith(("/proc/", "/sys/")):
                found[int(name)] = file
    return found


def asleep(pid: int) -> bool:
    return _state_and_parent(pid)[0] == "S"


def process_name(pid: int) -> str:
    """The role a process of an instance has given itself (its comm)."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    """Those that have not ended."""
    return [child for child, parent in _parents().items() if parent == pid]


def descendants(pid: int) -> dict[int, str]:
    """Children's children and so on that have not ended, with their names, without the process itself."""
    parents = _parents()
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child: process_name(child) for child in found - {pid}}


def _parents() -> dict[int, int]:
    """Of all processes of the machine; waiting tests ask many times a second, so it takes few steps for each."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                state, parent = _state_and_parent(int(entry))
                if state != "Z":
                    parents[int(entry)] = parent
    return parents


def _state_and_parent(pid: int) -> tuple[str, int]:
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as stat:
        state, parent = stat.read().rpartition(b")")[2].split(None, 2)[:2]
    return state.decode(), int(parent)


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """The names in /dev/shm that these processes have opened and mapped, removed ones too."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found |= set(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
    return found
