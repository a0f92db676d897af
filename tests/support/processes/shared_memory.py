"""Files in shared memory that processes have open or mapped, from /proc."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

_NAMES = ("/memfd:", "/dev/shm/", "/dev/zero", "/SYSV")  # the last two are shared memory without a file


class SharedFile(NamedTuple):
    """A file in shared memory: how much memory it takes, and the processes that hold it, as NAME:PID."""

    name: str
    size_bytes: int
    holders: tuple[str, ...]


def shared_files(processes: Mapping[int, str]) -> list[SharedFile]:
    """Return the files that these processes hold, the largest first. ``processes``: pid → name."""
    found: dict[tuple[int, int], tuple[str, int]] = {}
    holders: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    for pid, process in processes.items():
        for folder in (f"/proc/{pid}/fd", f"/proc/{pid}/map_files"):
            with contextlib.suppress(OSError):  # the process has ended
                for entry in os.scandir(folder):
                    with contextlib.suppress(OSError):
                        name = os.readlink(entry.path)
                        if name.startswith(_NAMES):
                            file = os.stat(entry.path)
                            found[file.st_dev, file.st_ino] = name, file.st_blocks * 512
                            holders[file.st_dev, file.st_ino].add(f"{process}:{pid}")
    files = [SharedFile(*file, tuple(sorted(holders[key]))) for key, file in found.items()]
    return sorted(files, key=lambda file: -file.size_bytes)
