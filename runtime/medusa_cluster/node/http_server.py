"""The node's only listener on the network. Every request except ``/healthz`` needs the cluster's token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from aiohttp import web
from medusa_runtime.errors import (
    ConfigError,
    MedusaError,
    NoControllerError,
    UnauthorizedError,
    UnknownNameError,
)
from medusa_runtime.prometheus import expiration
from medusa_runtime.storage.peer_access import PeerAccess

from ..connections import Connections, http_logger, require_token, track_request
from ..json_lines import error_answer
from .controller_client import ControllerClient
from .forwarding import Forwarder
from .settings import NodeServerSettings

_LARGEST_CALL_BYTES = 16 << 20
_HEAD_S = 10.0  # for the TLS handshake, and for the head of a request: a client can begin both without the token


class NodeHttpServer:
    """The HTTP server for instances, the controller, probes, metrics, and the routes that it is given."""

    def __init__(
        self,
        settings: NodeServerSettings,
        access: PeerAccess,
        forwarder: Forwarder,
        controller: ControllerClient,
        routes: Iterable[web.RouteDef],
    ) -> None:
        """Make the server. ``routes``: further routes, such as those of the regions."""
        self._settings = settings
        self._controller = controller
        self._forwarder = forwarder
        self._access = access
        self.app = web.Application(
            client_max_size=_LARGEST_CALL_BYTES, middlewares=[track_request, require_token(access.token)]
        )
        self.app.router.add_get("/healthz", self._health)
        self.app.router.add_get("/metrics", self._metrics)
        self.app.router.add_post("/cluster/{operation}", self._cluster)
        self.app.router.add_route("*", "/instances/{id}/{path:.*}", forwarder.handle)
        self.app.router.add_routes(routes)
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._timeouts_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises ConfigError if the address is not available."""
        await self._forwarder.start()
        # When a caller goes away, this cancels the handler and with it the forwarded request.
        self._runner = web.AppRunner(
            self.app,
            handler_cancellation=True,
            auto_decompress=False,  # a body is forwarded with the length that it came with
            access_log=None,
            shutdown_timeout=1.0,
            logger=http_logger(),
        )
        await self._runner.setup()
        assert self._runner.server is not None
        connections = Connections(self._runner.server, _HEAD_S, self._access.server_context())
        host, port = self._settings.host, self._settings.data_port
        try:
            self._server = await asyncio.get_running_loop().create_server(
                connections,
                host,
                port,
                backlog=1024,
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another address with --host or --data-port"
            ) from None
        self._timeouts_task = asyncio.create_task(connections.run())

    async def close(self) -> None:
        if self._timeouts_task is not None:
            self._timeouts_task.cancel()
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await self._forwarder.close()

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"name": self._settings.name})

    async def _metrics(self, _: web.Request) -> web.Response:
        lines = expiration("medusa_cluster_node", self._access.expires_at_s)
        return web.Response(text="".join(f"{line}\n" for line in lines), content_type="text/plain", charset="utf-8")

    async def _cluster(self, request: web.Request) -> web.Response:
        operation = request.match_info["operation"]
        try:
            arguments = await _arguments(request)
            if not isinstance(arguments, dict):
                raise ConfigError("expected a JSON object of arguments")
            if operation == "join" and self._settings.is_head:
                return web.json_response({"ok": self._joining()})
            return web.json_response({"ok": await self._controller.call(operation, arguments)})
        except MedusaError as error:
            return web.json_response(error_answer(error), status=status_of(error))

    def _joining(self) -> dict[str, Any]:
        """Return what another node needs to know before it starts Ray's processes."""
        return {"ray": f"{self._settings.url_host}:{self._settings.ray_port}", "head": self._settings.name}


async def _arguments(request: web.Request) -> Any:
    """Return the JSON of a request's body. Raises ConfigError if it is no JSON or nested too deeply."""
    try:
        return await request.json() if request.can_read_body else {}
    except (ValueError, RecursionError) as error:  # ValueError also for a number with too many digits
        raise ConfigError(f"expected a JSON object of arguments: {error}") from None


def status_of(error: Exception) -> int:
    """Return the HTTP status for a call that failed with this error."""
    if isinstance(error, ConfigError | ValueError):
        return 400
    known = ((UnauthorizedError, 401), (UnknownNameError, 404), (NoControllerError, 503))
    return next((status for kind, status in known if isinstance(error, kind)), 500)
