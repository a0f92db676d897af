"""The routes, by which gateways know where to send requests. With their version, gateways can wait for changes."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any


class RoutePublisher:
    """The current routes. A version is text to be compared for equality only, and is new after a restart."""

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

    def publish(self, models: dict[str, Any]) -> None:
        """Use these routes, and wake the waiting calls if the routes have changed."""
        if models == self._models:
            return
        self._models = models
        self._count += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self, version: str, wait_s: float) -> dict[str, Any]:
        """Return the routes as soon as their version is another than ``version``, or after ``wait_s``."""
        if version == self.version:
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return self.current
