"""Kills a controller that does not answer any more, so that Ray starts it again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import suppress
from pathlib import Path

from medusa_runtime.errors import MedusaError

from ..json_lines import call

logger = logging.getLogger(__name__)

_PING_S = 1.0
_ANSWERS_WITHIN_S = 10.0


class ControllerWatch:
    """Asks the controller of this node again and again for its process. One that was stopped is killed by others."""

    def __init__(self, socket: Path, answers_within_s: float = _ANSWERS_WITHIN_S) -> None:
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
        try:
            async with asyncio.timeout(self._answers_within_s) as waiting:
                self._pid = int(await call(self._socket, {"op": "ping"}))
        except (OSError, MedusaError, ValueError):  # of which TimeoutError is one
            if waiting.expired() and pid is not None:
                logger.warning("the controller (process %d) hangs; killing it, so that it is started again", pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
