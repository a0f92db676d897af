"""Limits on the connections of a gateway or node server that have not sent the head of a request yet.

A client's time starts with the first byte of a request, and sending a byte now and then does not extend it. An instance
has the same limit. aiohttp alone limits only how long a connection may send nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from medusa_runtime.resource_limits import LEAST_FILES, most_files

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_POLL_S = 1.0
_TOO_SLOW = {"message": "the head came too slowly", "type": "invalid_request_error", "param": None}
_MOST_WAITING = 8192  # connections without a request; one more closes the oldest


class Connections:
    """A factory of connections' protocols, for ``loop.create_server(connections, …)``, that limits who waits.

    ``read_timeout_s`` is the time for the head of a request, from its first byte.
    """

    def __init__(self, server: web.Server, read_timeout_s: float) -> None:
        self._server = server
        self._read_timeout_s = read_timeout_s
        self._most_waiting = max(min(_MOST_WAITING, most_files() // 2), LEAST_FILES // 2)
        self._waiting: dict[_Connection, None] = {}  # the oldest first

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self._server(), self)

    async def run(self) -> None:
        """Close connections whose head is overdue, until cancelled."""
        while True:
            await asyncio.sleep(min(_POLL_S, self._read_timeout_s / 4))
            begun_before = time.monotonic() - self._read_timeout_s
            for connection in list(self._waiting):
                if connection.since is not None and connection.since < begun_before:
                    connection.close(timed_out=True)

    def add_waiting(self, connection: _Connection) -> None:
        """Note that a connection has no request. Closes the oldest such connection if there are too many."""
        if len(self._waiting) >= self._most_waiting:
            next(iter(self._waiting)).close()
        self._waiting[connection] = None

    def remove_waiting(self, connection: _Connection) -> None:
        """Note that a request's whole head has come, or that the connection is closed."""
        self._waiting.pop(connection, None)


class _Connection(asyncio.Protocol):
    """A protocol in front of aiohttp's own for one connection. ``since``: when the head that is arriving began."""

    def __init__(self, inner: asyncio.BaseProtocol, connections: Connections) -> None:
        self._inner = cast("asyncio.Protocol", inner)
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._has_request = False
        self.since: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add_waiting(self)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self.since is None and not self._has_request:
            self.since = time.monotonic()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.remove_waiting(self)
        self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def begin_request(self) -> None:
        """Note that a request's whole head has come."""
        self._has_request, self.since = True, None
        self._connections.remove_waiting(self)

    def end_request(self) -> None:
        """Note that the request has been answered."""
        self._has_request = False
        if self._transport is not None and not self._transport.is_closing():
            self._connections.add_waiting(self)

    def close(self, *, timed_out: bool = False) -> None:
        """Close the connection, with status 408 if its head has ``timed_out``."""
        self._connections.remove_waiting(self)
        assert self._transport is not None
        if timed_out and not self._transport.is_closing():
            body = json.dumps({"error": _TOO_SLOW | {"code": "incomplete_head"}}, separators=(",", ":")).encode()
            head = "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
            self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self._transport.close()


@web.middleware
async def track_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Note at a request's connection when the request begins and ends."""
    connection = None if request.transport is None else request.transport.get_protocol()
    if not isinstance(connection, _Connection):
        return await handler(request)
    connection.begin_request()
    try:
        return await handler(request)
    finally:
        connection.end_request()


def http_logger() -> logging.Logger:
    """Return a logger for aiohttp's servers that drops malformed requests: a client could fill the log with them."""
    logger = logging.getLogger(f"{__name__}.http")
    if not logger.filters:
        malformed = (HttpProcessingError, web.RequestPayloadError)
        logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], malformed)))
    return logger
