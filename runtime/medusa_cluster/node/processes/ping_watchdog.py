"""A watch that kills a process of this node which does not answer, or no longer, so that Ray starts it again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from medusa_runtime.errors import MedusaError

from ...json_lines import call
from .stopped import descendants, state

logger = logging.getLogger(__name__)

_PING_S = 0.5
_POLL_S = 0.1
_LONGEST_POLL_S = 0.2  # the most that one poll counts: if it took longer, this process was held up itself
_LONGEST_DISK_S = 10.0  # how long a process may wait for the disk
_FIRST_ANSWER_S = 60.0  # Ray itself ends a process that has not registered with it by then
_UNTITLED = b"ray::IDLE"  # Ray's title of a worker that imports its actor's class, or has nothing to do


class PingWatchdog:
    """A watch that pings a process on its socket, again and again, and kills one that does not answer in time."""

    def __init__(self, what: str, socket: Path, answers_within_s: float, title: str) -> None:
        """Make a watch. ``what`` names the process in the log. Ray's title of it begins with ``title``.

        The first answer may take a minute, and all others ``answers_within_s``. Neither includes time in which the
        process waited for a CPU, or up to 10 s for the disk.
        """
        self._what = what
        self._socket = socket
        self._answers_within_s = answers_within_s
        self._title = title.encode()
        self._answered_pid: int | None = None  # the process that gave the last answer

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            pid = self._listener() or self._starting()
            if pid is not None:
                await self._check(pid)
            await asyncio.sleep(_PING_S)

    async def _check(self, pid: int) -> None:
        asking = asyncio.create_task(self._ask(pid))
        try:
            limit_s = self._answers_within_s if pid == self._answered_pid else _FIRST_ANSWER_S
            if not await _done_within(limit_s, asking, pid):
                logger.error("%s (process %d) hangs; killing it, so that it is started again", self._what, pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _ask(self, pid: int) -> None:
        """Return when the process has answered, has ended, or has become another actor."""
        while state(pid) not in ("", "Z") and not self._is_another(pid):
            try:
                await call(self._socket, {"op": "ping"})
            except OSError:  # it does not listen yet, or too many others wait for it
                await asyncio.sleep(_POLL_S)
                continue
            except (MedusaError, ValueError):
                pass  # an answer, too
            self._answered_pid = pid
            return

    def _listener(self) -> int | None:
        """Return the process that listens on the socket, or None if there is none."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            try:
                connection.connect(str(self._socket))
            except BlockingIOError:  # as many wait for it as may
                return self._answered_pid
            except OSError:
                return None
            return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])

    def _starting(self) -> int | None:
        """Return the process that is to listen on the socket, or None if there is none.

        It has its title only once it has imported the actor's class. Before that, it is any of Ray's workers without a
        title; Ray soon ends one that has nothing to do.
        """
        untitled = None
        for pid in descendants():
            title = _title(pid)
            if title.startswith(self._title):
                return pid
            if title == _UNTITLED:
                untitled = pid
        return untitled

    def _is_another(self, pid: int) -> bool:
        """Return whether a process, which had no title, has one now that is not this watch's."""
        title = _title(pid)
        return title.startswith(b"ray::") and not title.startswith(self._title) and title != _UNTITLED


def _title(pid: int) -> bytes:
    """Return the first word of a process's command line, which Ray replaces by a title. Empty without a process."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(256).partition(b"\0")[0].rstrip()
    except OSError:
        return b""


async def _done_within(limit_s: float, asking: asyncio.Task[None], pid: int) -> bool:
    """Wait until the task is done. Return whether it was in time."""
    passed_s, disk_s, before = 0.0, 0.0, _cpu_waits_s(pid)
    while passed_s - _longer_s(_cpu_waits_s(pid), before) < limit_s:
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


def _cpu_waits_s(pid: int) -> dict[str, float]:
    """Return how long each thread of a process has been ready to run without a CPU, by thread id.

    Empty if the kernel does not report it, or if there is no such process.
    """
    return {thread: int(text.split()[1]) / 1e9 for thread, text in _of_threads(pid, "schedstat")}


def _waits_for_disk(pid: int) -> bool:
    """Return whether a thread of the process is in uninterruptible sleep, as when it waits for the disk."""
    return any(text.rpartition(b")")[2].split()[0] == b"D" for _, text in _of_threads(pid, "stat"))


def _of_threads(pid: int, name: str) -> Iterator[tuple[str, bytes]]:
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
