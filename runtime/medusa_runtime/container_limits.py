"""The CPUs and the memory that this container may use: not the host's, but those of its cgroup (v1 or v2) and affinity.

All files are read below ``root``, so that tests can pass a tree of their own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/")
# "No limit" is the word "max" in v2 and a number close to 2^63 in v1.
_UNLIMITED_BYTES = 1 << 60
_COUNTERS = ("memory.events", "memory.oom_control")  # have a line "oom_kill", in v2 and v1
_RECENT_S = 5.0


class _Mount(NamedTuple):
    """A mounted cgroup hierarchy.

    ``top`` is the group that is mounted, as a path in the hierarchy, and ``point`` the folder where it is mounted.
    ``controllers`` is None for v2, where one hierarchy has all of them.
    """

    top: str
    point: Path
    controllers: frozenset[str] | None


def cpu_count(root: Path = _ROOT) -> int:
    """Return how many CPUs to use: those this process may run on, at most the container's quota rounded up."""
    count = len(os.sched_getaffinity(0))
    for folder in _groups(root, "cpu"):
        quota = _cpu_quota(folder)
        if quota is not None:
            count = min(count, -int(-quota // 1))
    return max(count, 1)


def memory_limit_bytes(root: Path = _ROOT) -> int | None:
    """Return the smallest memory limit of this container and the groups around it; None when nothing limits it."""
    limits = [limit for folder in _groups(root, "memory") if (limit := _memory_limit(folder)) is not None]
    return min(limits, default=None)


def memory_available_bytes(root: Path = _ROOT) -> int:
    """Return how many bytes can still be allocated: the least of what the host has and what each limit leaves.

    Inactive file cache counts as free, as in Kubernetes' working set: the kernel drops it before a limit kills a
    process. What this process maps does not: it would be read again and again. Nor does shared memory, which can only
    be swapped.
    """
    available = _field(root / "proc/meminfo", "MemAvailable:") or 0
    available *= 1024
    mapped = (_field(root / "proc/self/status", "RssFile:") or 0) * 1024
    for folder in _groups(root, "memory"):
        limit = _memory_limit(folder)
        usage = _number(folder / "memory.current")
        if usage is None:
            usage = _number(folder / "memory.usage_in_bytes")
        if limit is not None and usage is not None:
            available = min(available, max(limit - usage + _unused_files(folder, mapped), 0))
    return available


class OutOfMemory:
    """Finds out whether a process was killed because this container's memory limit was reached.

    The kernel counts such kills but does not say which process each one hit. So a process that SIGKILL has ended within
    five seconds of such a kill counts as killed for that reason. Call ``look`` now and then, so that older kills are
    known to be old.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._counter: Path | None = None
        self._searched = False
        self._seen: int | None = None
        self._last_s = -_RECENT_S  # when a kill was found last

    def look(self) -> bool:
        """Count the kills so far, and return whether there are new ones. In the first call, all count as old."""
        count = self._kills()
        new = self._seen is not None and count > self._seen
        self._seen = count
        if new:
            self._last_s = time.monotonic()
        return new

    def words(self) -> str:
        limit = memory_limit_bytes(self._root)
        return "memory ran out" + (f", the limit is {limit / 1e9:.2f} GB" if limit else "")

    def how(self, status: int) -> str:
        """Describe how a process ended. ``status`` is its exit status, or minus the number of the signal."""
        if status >= 0:
            return f"exit status {status}"
        how = f"killed by {signal_name(-status)}"
        return f"{how}: {self.words()}" if self.has_killed(status) else how

    def has_killed(self, status: int) -> bool:
        """Return whether a process that has ended with this status was killed because memory ran out."""
        if -status != signal.SIGKILL:
            return False
        self.look()
        return time.monotonic() - self._last_s < _RECENT_S

    def _kills(self) -> int:
        """Return the kernel's count for this process's own group; 0 where the kernel keeps none."""
        if not self._searched:
            self._searched = True
            files = (folder / name for folder in _groups(self._root, "memory") for name in _COUNTERS)
            self._counter = next((file for file in files if _field(file, "oom_kill") is not None), None)
        return 0 if self._counter is None else _field(self._counter, "oom_kill") or 0


def signal_name(number: int) -> str:
    """Return a signal's name; ``signal 40`` for a real-time signal, most of which have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def peak_bytes() -> int:
    """Return the most memory that this process has had resident, shared pages included."""
    return (_field(Path("/proc/self/status"), "VmHWM:") or 0) * 1024


def private_bytes() -> int:
    """Return the memory that this process has resident for itself alone; 0 if the kernel does not say."""
    return (_field(Path("/proc/self/status"), "RssAnon:") or 0) * 1024


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's groups under one controller, from its own up to the topmost visible one."""
    mounts = _mounts(root)
    for line in _lines(root / "proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        for mount in mounts:
            if mount.controllers is None:
                matches = names == ""
            else:
                matches = controller in mount.controllers and controller in names.split(",")
            if matches:
                yield from _upwards(mount, path)


def _upwards(mount: _Mount, path: str) -> Iterator[Path]:
    # Without a cgroup namespace the path is the host's, while only the container's own group is mounted.
    inside = path == mount.top or path.startswith(mount.top.rstrip("/") + "/")
    folder = mount.point / path[len(mount.top) :].strip("/") if inside else mount.point
    if ".." in folder.parts or not folder.is_dir():
        folder = mount.point
    yield folder
    while folder != mount.point:
        folder = folder.parent
        yield folder


def _mounts(root: Path) -> list[_Mount]:
    mounts = []
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = None if kind[0] == "cgroup2" else frozenset(kind[2].split(","))
        mounts.append(_Mount(fields[3], root / fields[4].lstrip("/"), controllers))
    return mounts


def _cpu_quota(folder: Path) -> float | None:
    """Return this group's quota in CPUs; None without one."""
    words = next(_lines(folder / "cpu.max"), "").split()
    if len(words) == 2 and words[0] != "max":
        return int(words[0]) / int(words[1])
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 else None


def _memory_limit(folder: Path) -> int | None:
    """Return this group's limit. In v1, its statistics include the limits of the groups above, visible or not."""
    found = (
        _number(folder / "memory.max"),
        _number(folder / "memory.limit_in_bytes"),
        _field(folder / "memory.stat", "hierarchical_memory_limit"),
    )
    return min((limit for limit in found if limit is not None and limit < _UNLIMITED_BYTES), default=None)


def _unused_files(folder: Path, mapped: int) -> int:
    """Return the bytes of the inactive file cache, but of ``mapped`` bytes as much as is not in the active one."""
    stat = folder / "memory.stat"
    prefix = "" if _field(stat, "total_inactive_file") is None else "total_"  # v1: those of the groups below, too
    active, inactive = (_field(stat, f"{prefix}{name}_file") or 0 for name in ("active", "inactive"))
    return max(min(inactive, active + inactive - mapped), 0)


def _field(path: Path, name: str) -> int | None:
    for line in _lines(path):
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            return int(words[1])
    return None


def _number(path: Path) -> int | None:
    text = next(_lines(path), "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file that are not empty; none when it is missing or may not be read."""
    try:
        # Not ``splitlines``: a mount's path may have any bytes, and only \n ends a line.
        yield from filter(None, path.read_text(errors="surrogateescape").split("\n"))
    except OSError:
        return


__all__ = ["OutOfMemory", "cpu_count", "memory_available_bytes", "memory_limit_bytes", "peak_bytes", "signal_name"]
