"""A cluster in one process for the tests of gateways: one node server and a controller, without nodes or Ray.

It speaks the protocol of docs/internals/cluster.md over real HTTP. Instances are real `medusa serve` processes, which
the test starts and adds.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from medusa_runtime.storage.peer_access import PeerAccess

TOKEN = "the-token-of-this-test-cluster"


class StandIn:
    """The node server's port, and what the controller knows. A context manager; methods may be called by any thread."""

    def __init__(self, access: PeerAccess | None = None) -> None:
        """``access``: its certificates are used."""
        self._access = access
        self.loop = asyncio.new_event_loop()
        self.models: dict[str, dict[str, Any]] = {}
        self.backends: dict[str, str] = {}
        self.loads: dict[str, dict[str, Any]] = {}  # by gateway, as reported last
        self.reports = 0
        self.wanted: list[str] = []  # models that had waiting requests and no instance, as they were reported
        self.status: dict[str, Any] = {}
        self.away = False  # the controller does not answer
        self.slow_routes = False  # a call that waits for new routes does not see them come
        self.version = 0
        self.calls: list[tuple[str, str]] = []  # instance and path of each request that was passed on
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="stand-in", daemon=True)
        self._ready = threading.Event()
        self.port = 0
        self.on_wanted: Callable[[str], None] = lambda _: None

    @property
    def url(self) -> str:
        return f"{'https' if self._access else 'http'}://127.0.0.1:{self.port}"

    def deploy(self, name: str, **settings: str) -> None:
        self.models[name] = {"deployment": {"name": name, "settings": settings}, "instances": []}
        self.change()

    def remove(self, name: str) -> None:
        del self.models[name]
        self.change()

    def add(self, name: str, instance: str, backend: str, state: str = "ready") -> None:
        """Let the model have an instance that listens at ``backend``."""
        self.backends[instance] = backend
        entry = {"id": instance, "node": "n1", "url": f"{self.url}/instances/{instance}", "state": state}
        self.models[name]["instances"] = [*self.models[name]["instances"], entry]
        self.change()

    def drop(self, name: str, instance: str) -> None:
        """Let the controller forget an instance; the node server still passes requests on to it."""
        self.models[name]["instances"] = [one for one in self.models[name]["instances"] if one["id"] != instance]
        self.change()

    def set_state(self, name: str, instance: str, state: str) -> None:
        self.models[name]["instances"] = [
            one | {"state": state} if one["id"] == instance else one for one in self.models[name]["instances"]
        ]
        self.change()

    def change(self) -> None:
        def note() -> None:
            self.version += 1
            self._changed.set()
            self._changed = asyncio.Event()

        self.loop.call_soon_threadsafe(note)

    def __enter__(self) -> StandIn:
        self._thread.start()
        assert self._ready.wait(120)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(120)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._serve())
        self.loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application(middlewares=[_checked], client_max_size=1 << 30)
        app.router.add_post("/cluster/{operation}", self._operation)
        app.router.add_route("*", "/instances/{id}/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        tls = None if self._access is None else self._access.server_context()
        site = web.TCPSite(runner, "127.0.0.1", self.port, ssl_context=tls)
        await site.start()
        self.port = runner.addresses[0][1]
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)
        ) as self._session:
            self._ready.set()
            await self._stop.wait()
            await runner.cleanup()

    async def _operation(self, request: web.Request) -> web.StreamResponse:
        if self.away:
            return web.json_response({"error": {"code": "Cluster.NoController", "message": "it is away"}}, status=503)
        arguments = await request.json()
        operation = request.match_info["operation"]
        if operation == "status":
            return web.json_response({"ok": self.status})
        if operation == "report":
            self._note(arguments)
            if arguments["version"] == str(self.version):
                return web.json_response({"ok": {"version": arguments["version"]}})
        elif operation == "routes" and arguments["version"] == str(self.version):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(arguments["wait_s"]):
                    await (asyncio.Event() if self.slow_routes else self._changed).wait()
        return web.json_response({"ok": {"version": str(self.version), "models": self.models}})

    def _note(self, arguments: dict[str, Any]) -> None:
        self.reports += 1
        self.loads[arguments["gateway"]] = arguments["loads"]
        for name, load in arguments["loads"].items():
            if load["waiting"] and not self.models.get(name, {}).get("instances"):
                self.wanted.append(name)
                self.on_wanted(name)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        instance, path = request.match_info["id"], request.match_info["path"]
        backend = self.backends.get(instance)
        if backend is None:
            return web.json_response({"error": {"code": "Cluster.NoInstance", "message": "no"}}, status=404)
        self.calls.append((instance, path))
        body = await request.read()
        kept = ("Content-Type", "X-Request-Id", "Traceparent")
        headers = {name: request.headers[name] for name in kept if name in request.headers}
        response: web.StreamResponse | None = None
        try:
            async with self._session.request(request.method, f"{backend}/{path}", data=body, headers=headers) as answer:
                response = web.StreamResponse(status=answer.status)
                for name in ("Content-Type", "Retry-After", "Content-Length", "X-Request-Id"):
                    if name in answer.headers:
                        response.headers[name] = answer.headers[name]
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except aiohttp.ClientConnectorError:
            return web.json_response({"error": {"code": "Cluster.NoInstance", "message": "it ended"}}, status=404)
        except aiohttp.ClientError:
            if response is None:
                return web.json_response({"error": {"code": "Cluster.Instance", "message": "it ended"}}, status=502)
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError from None


def write_token(folder: Path) -> Path:
    """Write the cluster's token to a file that only its user can read."""
    file = folder / "token"
    file.touch(mode=0o600)
    file.write_text(TOKEN)
    return file


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _checked(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.headers.get("Authorization") != f"Bearer {TOKEN}":
        return web.json_response({"error": {"code": "Cluster.Unauthorized", "message": "no token"}}, status=401)
    return await handler(request)
