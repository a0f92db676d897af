"""The gateway's process, from the first connection to the drain."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

import aiohttp
from aiohttp import web
from medusa_runtime.config import Settings
from medusa_runtime.instance.listeners import bind, url_of
from medusa_runtime.process_limits import make_room_for_files

from ..connections import Connections, http_logger
from .access_log import AccessLog
from .gateway import Gateway, GatewayOptions
from .server import GatewayServer

logger = logging.getLogger(__name__)

_REFUSED_S = 1.0  # the time to send refusals at the end of a drain


async def serve(options: GatewayOptions, listener: socket.socket, on_listening: Callable[[], None]) -> int:
    """Serve on ``listener`` until SIGTERM or SIGINT, then drain. Return the exit status: 1 if requests were cut off."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # No limit of connections: each request has one, and the dispatch limits the requests.
    tls = options.access.client_context()
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=20.0, ssl=True if tls is None else tls)
    async with aiohttp.ClientSession(
        connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        gateway = Gateway(options, session, _url(options, listener))
        server = GatewayServer(gateway)
        runner = web.AppRunner(
            server.application(),
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None if options.access_log == "off" else logger,
            access_log_class=AccessLog,
            access_log_format=options.access_log,
            shutdown_timeout=1.0,
            keepalive_timeout=75.0,
            logger=http_logger(),
        )
        await runner.setup()
        assert runner.server is not None
        connections = Connections(runner.server, options.read_timeout_s)
        accepting = await loop.create_server(connections, sock=listener)
        looking = asyncio.create_task(connections.run())
        running = asyncio.create_task(gateway.run())
        on_listening()
        try:
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running  # raises the error that ended it
            return await _drain(server, accepting, stop, options.drain_s)
        finally:
            accepting.close()
            looking.cancel()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            await runner.cleanup()
            if server.tracer is not None:
                await asyncio.to_thread(server.tracer.close)


async def _drain(server: GatewayServer, accepting: asyncio.Server, stop: asyncio.Event, drain_s: float) -> int:
    """Accept no more connections, and let running requests end. A second signal ends them at once."""
    server.draining = True
    stop.clear()
    accepting.close()
    if server.in_flight:
        logger.info("waiting for %d requests, for at most %g s", server.in_flight, drain_s)
    idle = asyncio.create_task(server.wait_idle(drain_s))
    again = asyncio.create_task(stop.wait())
    await asyncio.wait({idle, again}, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if not idle.done():
        idle.cancel()
        return 1
    if idle.result():
        return 0
    server.refuse_waiting()
    await server.wait_idle(_REFUSED_S)
    return 1


def _url(options: GatewayOptions, listener: socket.socket) -> str:
    """Return the URL of this gateway that it reports to the controller."""
    host = options.host if options.host not in ("0.0.0.0", "::", "") else socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def run(options: GatewayOptions, on_listening: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit status. Raises ConfigError for an unusable address.

    ``on_listening`` is called with the gateway's URL.
    """
    make_room_for_files()
    listener = bind(Settings(host=options.host, port=options.port))
    listener.setblocking(False)
    return asyncio.run(serve(options, listener, lambda: on_listening(url_of(listener))))
