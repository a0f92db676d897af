"""The node actor, which passes Ray calls on to the control socket of its node's server.

It keeps no state, so Ray may start it again at any time. Engines and instances are children of the node server, because
Ray would end an actor's children with it. The node server checks again and again whether the actor still works.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from medusa_runtime.errors import ClusterError, MedusaError

from ...json_lines import JsonLinesServer, call, error_answer
from ..settings import ACTOR_SOCKET
from .processes import CONTROL_SOCKET_VARIABLE

NAMESPACE = "medusa"

_Method = TypeVar("_Method", bound=Callable[..., Any])


def actor_name(node: str) -> str:
    return f"node-{node}"


def _group(name: str) -> Callable[[_Method], _Method]:
    """Put a method into one of Ray's concurrency groups, so that long calls leave room for short ones.

    Does the same as ``ray.method(concurrency_group=name)``, without importing Ray.
    """

    def mark(method: _Method) -> _Method:
        method.__ray_concurrency_group__ = name  # type: ignore[attr-defined]
        return method

    return mark


class NodeActor:
    """The actor. Each method is an operation of the control socket, and returns ``{"ok": …}`` or ``{"error": …}``."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Ray awaits it
        self._socket = os.environ[CONTROL_SOCKET_VARIABLE]
        self._loops = {asyncio.get_running_loop()}  # Ray runs each concurrency group in a loop of its own
        self._server = JsonLinesServer(Path(self._socket).with_name(ACTOR_SOCKET), self._ping)
        await self._server.start()

    async def _ping(self, _: dict[str, Any]) -> int:
        """Return this process's pid, once each of its event loops has run."""
        for loop in list(self._loops):
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.pid(), loop))
        return os.getpid()

    @_group("control")
    async def ping(self) -> dict[str, Any]:
        self._loops.add(asyncio.get_running_loop())
        return {"ok": {}}

    @_group("control")
    async def fetch(
        self, url: str, sources: list[str] | None, pin: bool, version: str = "", layers: str | None = None
    ) -> dict[str, Any]:
        request = {"op": "fetch", "url": url, "sources": sources, "pin": pin, "version": version, "layers": layers}
        return await self._forward(request)

    @_group("control")
    async def group_port(self) -> dict[str, Any]:
        return await self._forward({"op": "group_port"})

    @_group("control")
    async def consolidate(self, id: str, keep: int) -> dict[str, Any]:
        return await self._forward({"op": "consolidate", "id": id, "keep": keep})

    @_group("control")
    async def release(self, id: str) -> dict[str, Any]:
        return await self._forward({"op": "release", "id": id})

    @_group("data")
    async def describe(self, url: str) -> dict[str, Any]:
        return await self._forward({"op": "describe", "url": url})

    @_group("control")
    async def pace(self, bytes_per_s: float | None) -> dict[str, Any]:
        return await self._forward({"op": "pace", "bytes_per_s": bytes_per_s})

    @_group("data")
    async def drop(self, url: str) -> dict[str, Any]:
        return await self._forward({"op": "drop", "url": url})

    @_group("data")
    async def unpin(self, url: str) -> dict[str, Any]:
        return await self._forward({"op": "unpin", "url": url})

    @_group("data")
    async def start(
        self, id: str, deployment: dict[str, Any], group: dict[str, Any] | None = None, device_bytes: int = 0
    ) -> dict[str, Any]:
        request = {"op": "start", "id": id, "deployment": deployment, "group": group, "device_bytes": device_bytes}
        return await self._forward(request)

    @_group("data")
    async def stop(self, id: str, drain_s: float) -> dict[str, Any]:
        return await self._forward({"op": "stop", "id": id, "drain_s": drain_s})

    @_group("control")
    async def resume(self, id: str) -> dict[str, Any]:
        return await self._forward({"op": "resume", "id": id})

    async def pid(self) -> int:
        return os.getpid()

    async def _forward(self, request: dict[str, Any]) -> dict[str, Any]:
        self._loops.add(asyncio.get_running_loop())
        try:
            return {"ok": await call(self._socket, request)}
        except MedusaError as error:
            return error_answer(error)
        except OSError as error:
            return error_answer(ClusterError(f"the node server does not answer: {error.strerror or error}"))
