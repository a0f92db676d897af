"""Kills processes that have been stopped (SIGSTOP): whoever waits for them would wait for ever."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

_STOPPED_S = 1.5


class StoppedProcesses:
    """Looks at processes now and then, at all our descendants by default. One that a debugger holds is left alone."""

    def __init__(self, pids: Callable[[], list[int]] | None = None) -> None:
        self._pids = pids or _descendants
        self._since: dict[int, float] = {}

    def look(self) -> None:
        """Kill those that were stopped at each look of the last seconds."""
        now = time.monotonic()
        stopped = [pid for pid in self._pids() if _state(pid) == "T"]
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        for pid, since in self._since.items():
            if now - since > _STOPPED_S:
                logger.error(
                    "the process %d (%s) was stopped; killing it, so that it is started again", pid, _name(pid)
                )
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _descendants() -> list[int]:
    found, pending = [], [os.getpid()]
    while pending:
        with suppress(OSError, ValueError):
            pid = pending.pop()
            children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            found += children
            pending += children
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"
