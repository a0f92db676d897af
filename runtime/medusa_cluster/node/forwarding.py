"""Forwarding of requests under ``/instances/<id>/`` to the instance, and of its answers back, piece by piece."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import TYPE_CHECKING

from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, web
from aiohttp.client_exceptions import ClientConnectorError, ClientError
from medusa_runtime.errors import InstanceError, NoInstanceError
from multidict import CIMultiDict
from yarl import URL

from ..json_lines import error_answer
from ..transport.pacing import connection_of, mark_serving

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .instances import Instances, RunningInstance

logger = logging.getLogger(__name__)

_END_POLLS, _END_POLL_S = 50, 0.02  # how long to wait for an instance to end after its connection broke

# What comes before the path in a request's target in absolute form (RFC 9112 §3.2.2), as clients send it to a proxy.
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")

# Headers that concern one connection and not the message (RFC 9110 §7.6.1), and Host and Authorization, which are
# replaced.
_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
     "upgrade", "host", "authorization", "expect")
)  # fmt: skip


class Forwarder:
    """The handler of ``/instances/<id>/<path>``. It buffers nothing: each piece is forwarded when it arrives."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances
        self._session: ClientSession | None = None

    async def start(self) -> None:
        self._session = ClientSession(
            connector=TCPConnector(limit=0, keepalive_timeout=30.0),
            timeout=ClientTimeout(total=None, sock_connect=5.0),
            auto_decompress=False,
            cookie_jar=DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        instance = self._instances.get(request.match_info["id"])
        # One that ends would take the request and break it off, and the gateway could not know that it had not begun.
        if instance is None or instance.port is None or instance.ending:
            error = NoInstanceError(f"this node has no instance {request.match_info['id']} that listens")
            return web.json_response(error_answer(error), status=404)
        if (connection := connection_of(request.transport)) is not None:
            mark_serving(connection)
        instance.running += 1
        if instance.first_request_ns is None and request.method == "POST":
            instance.first_request_ns = time.monotonic_ns()
        try:
            return await self._forward(request, instance, instance.port)
        finally:
            instance.running -= 1

    async def _forward(self, request: web.Request, instance: RunningInstance, port: int) -> web.StreamResponse:
        assert self._session is not None
        # What follows the instance's id, not decoded.
        target = _ORIGIN.sub("", request.raw_path)
        path = target.split("/", 3)[3] if target.count("/") > 2 else ""
        headers = _end_to_end_headers(request.headers)
        headers["Authorization"] = f"Bearer {instance.secret}"
        response: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method,
                URL(f"http://127.0.0.1:{port}/{path}", encoded=True),
                headers=headers,
                data=request.content.iter_any() if request.body_exists else None,
                allow_redirects=False,
            ) as answer:
                response = web.StreamResponse(
                    status=answer.status, reason=answer.reason, headers=_end_to_end_headers(answer.headers)
                )
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
        except ClientConnectorError:
            # The request has not begun, so a gateway may try again as often as it likes.
            gone = NoInstanceError(await end_reason(instance) or f"the instance {instance.id} no longer listens")
            return web.json_response(error_answer(gone), status=404)
        except (ClientError, TimeoutError) as error:
            if request.transport is None or request.transport.is_closing():
                raise asyncio.CancelledError from None  # our own caller has gone
            logger.warning("the instance %s broke off: %s", instance.id, error)
            if response is None or not response.prepared:
                broken = InstanceError(
                    await end_reason(instance) or f"the instance {instance.id} ended before it answered"
                )
                return web.json_response(error_answer(broken), status=502)
            # The reader must see that the answer is incomplete.
            request.transport.abort()
        return response


async def end_reason(instance: RunningInstance) -> str | None:
    """Return why an instance ended by itself, or None if it did not. Waits a second at most for it to end.

    The reason includes the last line of its output, for example that this node does not have the model's folder.
    """
    for _ in range(_END_POLLS):
        if instance.failure is not None or instance.child is None or instance.state == "draining":
            break
        await asyncio.sleep(_END_POLL_S)
    return instance.failure


def _end_to_end_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    found: CIMultiDict[str] = CIMultiDict()
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    for name, value in headers.items():
        if name.lower() not in _HOP_BY_HOP and name.lower() not in named:
            found.add(name, value)
    return found
