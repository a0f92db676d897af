"""A control group with a memory limit, in which the kernel really kills: the process that a test points out."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from benchmarks import memory_group

# Takes memory, in the end a page at a time, until the kernel has killed once more; then it gives all of it back. That
# takes a while, in which the limit is twice as high: a process that was started anew would be killed, too.
_GREED = """
import mmap, os, sys
kills, usage, limit_file, limit = os.open(sys.argv[1], os.O_RDONLY), sys.argv[2], sys.argv[3], int(sys.argv[4])
higher = os.open(limit_file, os.O_WRONLY)

def killed():
    return int(os.pread(kills, 4096, 0).split(b"oom_kill ")[1].split()[0])

before, taken, at, piece = killed(), mmap.mmap(-1, limit), 0, bytes(1 << 20)
while limit - int(open(usage).read()) > 64 << 20:
    taken[at : at + len(piece)] = piece
    at += len(piece)
for page in range(at, limit, 4096):
    if killed() > before:
        os.write(higher, b"%d" % (2 * limit))
        os._exit(0)
    taken[page] = 1
"""


class MemoryGroup(memory_group.MemoryGroup):
    """One for a test, which is skipped where no group can be made."""

    def __init__(self, limit_mb: int) -> None:
        super().__init__(limit_mb * 1_000_000)
        self._greedy_kills = 0

    def __enter__(self) -> Self:
        try:
            return super().__enter__()
        except OSError as error:
            pytest.skip(f"no control group with a memory limit can be made here: {error}")

    def __exit__(self, *_: object) -> None:
        try:
            super().__exit__()
        except OSError:
            pytest.fail(f"{self.folder} still has processes: {(self.folder / 'cgroup.procs').read_text().split()}")

    def kills(self) -> int:
        """Return how many of its processes the kernel has killed for want of memory, without those that used it up."""
        return super().kills() - self._greedy_kills

    def kill(self, pid: int) -> None:
        """Use up the group's memory until the kernel has killed this process of the group."""
        for other in (self.folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has just ended
                Path(f"/proc/{other}/oom_score_adj").write_text("1000" if int(other) == pid else "0")
        self.exhaust()

    def exhaust(self) -> None:
        """Use up the group's memory until the kernel has killed a process of the group, whichever it takes."""
        greed = [*self.inside, sys.executable, "-S", "-c", _GREED]
        files = (self._kills, self._usage, self._limit)
        ended = subprocess.run([*greed, *files, str(self.limit_bytes)], check=False, timeout=120)
        self._limit.write_text(str(self.limit_bytes))
        # Where a killed process gives back less than the kernel wants at once, the largest one is next: the greedy one.
        assert ended.returncode in (0, -signal.SIGKILL)
        self._greedy_kills += ended.returncode != 0


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[MemoryGroup]:
    """A group whose limit is the test's parameter, in MB."""
    with MemoryGroup(request.param) as made:
        yield made
