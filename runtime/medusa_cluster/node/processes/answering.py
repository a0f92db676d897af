"""Kills a process of this node that does not answer any more, so that Ray starts it again."""

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
_LOOK_S = 0.1
_LONGEST_LOOK_S = 0.2  # a look that comes later than that was held up itself
_LONGEST_DISK_S = 10.0  # that a process may wait for the disk


class AnswerWatch:
    """Asks a process again and again for its pid, on its socket. One that was stopped is killed by others."""

    def __init__(self, what: str, socket: Path, answers_within_s: float) -> None:
        """``what`` it is, for the log. ``answers_within_s``: time in which it waited for a CPU or for the disk does not
        count.
        """
        self._what = what
        self._socket = socket
        self._answers_within_s = answers_within_s
        self._pid: int | None = None  # while it answers

    async def run(self) -> None:
        """Work until cancelled."""
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
            return  # it has ended, or has only begun to start
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _answered(self, asking: asyncio.Task[object], pid: int | None) -> bool:
        """Wait for the answer; False when it does not come."""
        passed_s, disk_s, before = 0.0, 0.0, _cpu_waits_s(pid)
        while passed_s - _longer_s(_cpu_waits_s(pid), before) < self._answers_within_s:
            began = time.monotonic()
            await asyncio.wait({asking}, timeout=_LOOK_S)
            if asking.done():
                return True
            look_s = min(time.monotonic() - began, _LONGEST_LOOK_S)
            if disk_s < _LONGEST_DISK_S and _waits_for_disk(pid):
                disk_s += look_s
            else:
                passed_s += look_s
        return False


def _cpu_waits_s(pid: int | None) -> dict[str, float]:
    """Return how long each thread of a process has been ready to run and had no CPU;

    empty where the kernel does not say.
    """
    return {thread: int(text.split()[1]) / 1e9 for thread, text in _of_threads(pid, "schedstat")}


def _waits_for_disk(pid: int | None) -> bool:
    """Return whether any thread of a process is in uninterruptible sleep, as one is that waits for the disk."""
    return any(text.rpartition(b")")[2].split()[0] == b"D" for _, text in _of_threads(pid, "stat"))


def _of_threads(pid: int | None, name: str) -> Iterator[tuple[str, bytes]]:
    """Read a file of each thread's folder in /proc (proc(5)); nothing of those that have ended."""
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
