"""Where gateways send requests, with a version, so that they can wait for the next one."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any


class Routes:
    """The last routes. A version is text that is compared for equality alone; it is new after a restart, too."""

    def __init__(self) -> None:
        self._start = secrets.token_hex(4)
        self._count = 0
        self._models: dict[str, Any] = {}
        self._changed = asyncio.Event()

    @property
    def version(self) -> str:
        return f"{self._start}-{self._count}"

    @property
    def current(self) -> dict[str, Any]:
        return {"version": self.version, "models": self._models}

    def update(self, models: dict[str, Any]) -> None:
        """Take over these routes, and wake those who wait if they are others."""
        if models == self._models:
            return
        self._models = models
        self._count += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def after(self, version: str, wait_s: float) -> dict[str, Any]:
        """The routes once they are others than those of ``version``, or after ``wait_s``."""
        if version == self.version:
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return self.current
