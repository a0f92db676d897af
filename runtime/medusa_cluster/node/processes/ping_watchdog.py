"""A watch that kills a process of this node which no longer answers, so that Ray starts it again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from medusa_runtime.errors import MedusaError

from ...json_lines import call

logger = logging.getLogger(__name__)

_PING_S = 0.5
_POLL_S = 0.1
_LONGEST_POLL_S = 0.2  # the most that one poll counts: if it took longer, this process was held up itself
_LONGEST_DISK_S = 10.0  # how long a process may wait for the disk


class PingWatchdog:
    """A watch that asks a process for its pid on its socket, again and again, and kills one that stops answering."""

    def __init__(self, what: str, socket: Path, answers_within_s: float) -> None:
        """Make a watch. ``what`` names the process in the log.

        ``answers_within_s`` does not include time in which the process waited for a CPU, or up to 10 s for the disk.
        """
        self._what = what
        self._socket = socket
        self._answers_within_s = answers_within_s
        self._pid: int | None = None  # from the last answer; None if there was none

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await self._ask()
            await asyncio.sleep(_PING_S)

    async def _ask(self) -> None:
        pid, self._pid = self._pid, None
        asking = asyncio.create_task(call(self._socket, {"op": "ping"}))
        try:
            if not await self._answered(asking, pid):
                if pid is not None:
                    logger.error("%s (process %d) hangs; killing it, so that it is started again", self._what, pid)
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return
            self._pid = int(asking.result())
        except (OSError, MedusaError, ValueError):
            return  # the process has ended, or is still starting
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _answered(self, asking: asyncio.Task[object], pid: int | None) -> bool:
        """Wait for the answer. Return whether it came in time."""
        passed_s, disk_s, before = 0.0, 0.0, _cpu_waits_s(pid)
        while passed_s - _longer_s(_cpu_waits_s(pid), before) < self._answers_within_s:
            began = time.monotonic()
            await asyncio.wait({asking}, timeout=_POLL_S)
            if asking.done():
                return True
            polled_s = min(time.monotonic() - began, _LONGEST_POLL_S)
            if disk_s < _LONGEST_DISK_S and _waits_for_disk(pid):
                disk_s += polled_s
            else:
                passed_s += polled_s
        return False


def _cpu_waits_s(pid: int | None) -> dict[str, float]:
    """Return how long each thread of a process has been ready to run without a CPU, by thread id.

    Empty if the kernel does not report it, or if there is no such process.
    """
    return {thread: int(text.split()[1]) / 1e9 for thread, text in _of_threads(pid, "schedstat")}


def _waits_for_disk(pid: int | None) -> bool:
    """Return whether a thread of the process is in uninterruptible sleep, as when it waits for the disk."""
    return any(text.rpartition(b")")[2].split()[0] == b"D" for _, text in _of_threads(pid, "stat"))


def _of_threads(pid: int | None, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield the id and the file ``name`` of each thread of a process, from /proc (proc(5)). Skips ended threads."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            text = b""
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/{name}", "rb") as file:
                text = file.read()
            if text:
                yield thread, text


def _longer_s(now: dict[str, float], before: dict[str, float]) -> float:
    """Return how long the thread that waited longest for a CPU has waited since ``before``."""
    return max((waited_s - before.get(thread, 0.0) for thread, waited_s in now.items()), default=0.0)
