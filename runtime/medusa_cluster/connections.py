"""Connections of gateways and node servers: who may send requests, and limits on what comes beside their bodies.

A client's time starts with the first byte of a request, and sending a byte now and then does not extend it. It is
counted in looks at the connections, so the time in which this process stands still does not count. A head may have
32 KiB. An instance has the same limits. aiohttp alone limits only how long a connection may send nothing, and takes two
megabytes for the headers of each connection, and for the trailers of each body.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable
from ssl import SSLContext
from typing import cast

from aiohttp import ClientResponse, StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware
from medusa_runtime.process_limits import LEAST_FILES, most_files

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_LOOK_S = 1.0
_HEAD_BYTES = 32 << 10
_HEAD_END = b"\r\n\r\n"
_MOST_FRAMING = 8  # bytes for each byte of a body: in chunks of a single byte, it takes six in all
_REFUSALS = {
    408: ("Request Timeout", "the head came too slowly", "incomplete_head"),
    431: ("Request Header Fields Too Large", f"the request's head is larger than {_HEAD_BYTES} bytes", "bad_http"),
}
_SCHEME = "Bearer "
_MOST_WAITING = 8192  # connections without a request; one more closes the oldest


class Connections:
    """A factory of connections' protocols, for ``loop.create_server(connections, …)``, that limits who waits.

    ``read_timeout_s`` is the time for the head of a request, from its first byte, and for a TLS handshake. With
    ``tls``, the protocols carry out the handshake, so ``create_server`` gets no context: until its end, the connection
    is one that waits.
    """

    def __init__(self, server: web.Server, read_timeout_s: float, tls: SSLContext | None = None) -> None:
        self._server = server
        self.read_timeout_s = read_timeout_s
        self.tls = tls
        self.looks = 0
        self._most_waiting = max(min(_MOST_WAITING, most_files() // 2), LEAST_FILES // 2)
        self._waiting: dict[_Connection, None] = {}  # the oldest first

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self._server(), self)

    async def run(self) -> None:
        """Close connections whose head is overdue, until cancelled."""
        look_s = min(_LOOK_S, self.read_timeout_s / 4)
        while True:
            await asyncio.sleep(look_s)
            self.looks += 1
            overdue = self.looks - 1 - self.read_timeout_s / look_s  # less one, since the first look may come at once
            for connection in list(self._waiting):
                if connection.begun_at is not None and connection.begun_at <= overdue:
                    connection.close(408)

    def add_waiting(self, connection: _Connection) -> None:
        """Note that a connection has no request. Closes the oldest such connection if there are too many."""
        if len(self._waiting) >= self._most_waiting:
            next(iter(self._waiting)).close()
        self._waiting[connection] = None

    def remove_waiting(self, connection: _Connection) -> None:
        """Note that a request's whole head has come, or that the connection is closed."""
        self._waiting.pop(connection, None)


class _Connection(asyncio.Protocol):
    """A protocol in front of aiohttp's own for one connection.

    ``begun_at`` is the number of looks at the connections before the head that is arriving began, or None.
    """

    def __init__(self, inner: asyncio.BaseProtocol, connections: Connections) -> None:
        self._inner = cast("asyncio.Protocol", inner)
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._handshake: asyncio.Task[None] | None = None
        self._early: list[bytes] | None = None  # what comes with the end of the handshake
        self._body: StreamReader | None = None  # of a request, until it is answered and all of its body has come
        self._answered = False
        self._received_bytes = 0  # of the head that is arriving, or since the request began
        self._end: bytes | None = b""  # the last bytes of that head; None once all of it has come
        self.begun_at: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add_waiting(self)
        if self._connections.tls is None:
            self._inner.connection_made(transport)
        else:
            self._transport.pause_reading()
            self._early = []
            self._handshake = asyncio.create_task(self._encrypt(self._transport, self._connections.tls))

    async def _encrypt(self, transport: asyncio.Transport, context: SSLContext) -> None:
        """Carry out the TLS handshake. A client that does not agree, or takes too long, is left."""
        loop, timeout_s = asyncio.get_running_loop(), self._connections.read_timeout_s
        try:
            encrypted = await loop.start_tls(
                transport, self, context, server_side=True, ssl_handshake_timeout=timeout_s
            )
        except OSError:
            encrypted = None
        early, self._early = self._early or (), None
        if encrypted is None or transport.is_closing():
            self._connections.remove_waiting(self)
            transport.abort()
            return
        self._transport = encrypted
        self._inner.connection_made(encrypted)
        for data in early:
            self.data_received(data)

    def data_received(self, data: bytes) -> None:
        if self._early is not None:
            self._early.append(data)
            return
        if self._answered and self._body is not None and self._body.is_eof():
            self._body, self._received_bytes = None, 0
        body = self._body
        if body is None and not self._takes_of_head(data):
            self.close(431)
            return
        self._inner.data_received(data)
        if body is not None and body is self._body:
            self._received_bytes += len(data)
            most_bytes = _HEAD_BYTES + _MOST_FRAMING * body.total_bytes
            # More are trailers, or requests ahead of this one's answer, unless aiohttp has yet to parse what came.
            if self._received_bytes > most_bytes and self._transport is not None and self._transport.is_reading():
                self.close()

    def _takes_of_head(self, data: bytes) -> bool:
        """Note bytes that come while there is no request. Return False if they make the head too large."""
        if self.begun_at is None:
            self.begun_at = self._connections.looks
        if self._end is None:
            return True  # the first bytes of a body
        if not self._received_bytes:
            data = data.lstrip(b"\r\n")  # empty lines before a request are no end of its head
        beginning = self._end + data
        size = self._received_bytes - len(self._end)
        self._received_bytes += len(data)
        if (found := beginning.find(_HEAD_END)) >= 0:
            self._end = None
            self.begun_at = self._connections.looks  # aiohttp's time from now on
            return size + found <= _HEAD_BYTES
        self._end = beginning[1 - len(_HEAD_END) :]
        return self._received_bytes <= _HEAD_BYTES

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._early is None else None

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.remove_waiting(self)
        if self._early is None:  # else there was none to aiohttp yet
            self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def begin_request(self, request: web.Request) -> None:
        """Note that a request's whole head has come."""
        self._body, self._answered, self.begun_at = request.content, False, None
        self._received_bytes, self._end = 0, b""
        self._connections.remove_waiting(self)

    def end_request(self) -> None:
        """Note that the request has been answered."""
        self._answered = True
        if self._transport is not None and not self._transport.is_closing():
            self._connections.add_waiting(self)

    def close(self, status: int | None = None) -> None:
        """Close the connection, with a ``status`` if its head comes too slowly (408) or is too large (431)."""
        self._connections.remove_waiting(self)
        assert self._transport is not None
        if status is not None and not self._transport.is_closing():
            phrase, message, code = _REFUSALS[status]
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
            body = json.dumps({"error": error}, separators=(",", ":")).encode()
            head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\nConnection: close\r\n"
            self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self._transport.close()


@web.middleware
async def track_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Note at a request's connection when the request begins and ends."""
    connection = None if request.transport is None else request.transport.get_protocol()
    if not isinstance(connection, _Connection):
        return await handler(request)
    connection.begin_request(request)
    try:
        return await handler(request)
    finally:
        connection.end_request()


def require_token(token: str) -> Middleware:
    """Return a middleware that answers 401 without ``Authorization: Bearer <token>``, except on ``/healthz``."""
    expected = token.encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        header = request.headers.get("Authorization", "")
        found = header.removeprefix(_SCHEME).encode("utf-8", "surrogateescape") if header.startswith(_SCHEME) else b""
        if not hmac.compare_digest(found, expected) and request.path != "/healthz":
            # The connection has to end, because the rest of a body that was not read may follow on it.
            return web.Response(
                status=401,
                headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
                text="expected the cluster's token: Authorization: Bearer …\n",
            )
        return await handler(request)

    return check


def http_logger() -> logging.Logger:
    """Return a logger for aiohttp's servers that drops malformed requests: a client could fill the log with them."""
    logger = logging.getLogger(f"{__name__}.http")
    if not logger.filters:
        malformed = (HttpProcessingError, web.RequestPayloadError)
        logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], malformed)))
    return logger


async def read_body(answer: ClientResponse, most_bytes: int) -> bytearray:
    """Read the body of another process's answer. Raises ValueError if it is longer than ``most_bytes``."""
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > most_bytes:
            raise ValueError(f"{answer.url.path}: expected at most {most_bytes} bytes, found more")
    return body
