"""Access to a node server, for callers who know the cluster's token."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SCHEME = "Bearer "


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


__all__ = ["require_token"]
