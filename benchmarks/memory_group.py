"""A control group with a memory limit, in which the kernel really kills. Only root can make one."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Self

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_GONE_S = 10.0


class MemoryGroup:
    """A new control group with a memory limit; a context manager. At its end all of its processes must be gone.

    Raises OSError where this machine allows no such group.
    """

    def __init__(self, limit_bytes: int) -> None:
        version_1 = (_V1 / "cgroup.procs").exists()
        self.folder = (_V1 if version_1 else _V2) / f"medusa-{os.urandom(4).hex()}"
        self.limit_bytes = limit_bytes
        self._limit = self.folder / ("memory.limit_in_bytes" if version_1 else "memory.max")
        self._kills = self.folder / ("memory.oom_control" if version_1 else "memory.events")
        self._usage = self.folder / ("memory.usage_in_bytes" if version_1 else "memory.current")

    def __enter__(self) -> Self:
        self.folder.mkdir()
        try:
            self._limit.write_text(str(self.limit_bytes))
        except OSError:
            self.folder.rmdir()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + _GONE_S
        while True:
            try:
                self.folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return

    @property
    def inside(self) -> list[str]:
        """A command that moves itself into the group and becomes what follows it."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh"]

    def kills(self) -> int:
        """Return how many of its processes the kernel has killed for want of memory."""
        return int(self._kills.read_text().split("oom_kill ")[1].split()[0])

    def shared_bytes(self) -> int:
        """Return the shared memory that its processes have made and that still exists, wherever they are."""
        return self._stat("shmem")

    def used_bytes(self) -> int:
        """Return the memory that the kernel cannot take back: all but the files that it has read."""
        with contextlib.suppress(OSError):
            files = self._stat("active_file") + self._stat("inactive_file")
            return int(self._usage.read_text()) - files
        return 0

    def _stat(self, name: str) -> int:
        stat = (self.folder / "memory.stat").read_text().split()
        return int(stat[stat.index(name) + 1])
