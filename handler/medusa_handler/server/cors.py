"""Cross-origin requests (CORS, the Fetch standard): which web pages may call this server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..http.origins import listed_origins

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_METHODS = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
_EXPOSED = "X-Request-Id, Retry-After, Server-Timing"
_MAX_AGE_S = "600"
_ORIGIN = re.compile(rb"\r\norigin:[ \t]*([!-~]*)[ \t]*(?=\r\n)", re.IGNORECASE)


def headers_for_origin(origins: str) -> Callable[[str], list[tuple[str, str]]]:
    """Return a function that maps a page's origin to the headers of the answer.

    If it is one of ``origins`` (``*`` or a list with commas), the headers let the page read the answer.
    """
    allowed = listed_origins(origins)

    def headers(origin: str) -> list[tuple[str, str]]:
        # A cache must not give a page the answer that another page, or a client without an origin, was given.
        cors_headers = [("Vary", "Origin")]
        if origin and (origin in allowed or "*" in allowed):
            cors_headers.append(("Access-Control-Allow-Origin", "*" if "*" in allowed else origin))
        return cors_headers

    return headers


def headers_for_head(origins: str, data: bytes) -> list[tuple[str, str]]:
    """Return the headers of the answer to a request of which only ``data`` has come: its head, or a part of it."""
    found = _ORIGIN.findall(data.partition(b"\r\n\r\n")[0] + b"\r\n")
    cors_headers = headers_for_origin(origins)(found[0].decode() if len(found) == 1 else "")
    return [*cors_headers, ("Access-Control-Expose-Headers", _EXPOSED)] if len(cors_headers) > 1 else cors_headers


def with_cors(app: WSGIApplication, origins: str) -> WSGIApplication:
    """Wrap ``app``: answer preflights, and let these origins (``*`` or a list with commas) read the answers."""
    headers_for = headers_for_origin(origins)

    def call(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        cors_headers = headers_for(environ.get("HTTP_ORIGIN", ""))
        may_read = len(cors_headers) > 1
        if may_read and environ["REQUEST_METHOD"] == "OPTIONS" and "HTTP_ACCESS_CONTROL_REQUEST_METHOD" in environ:
            asked = environ.get("HTTP_ACCESS_CONTROL_REQUEST_HEADERS", "")
            headers = [
                *cors_headers,
                ("Access-Control-Allow-Methods", _METHODS),
                ("Access-Control-Allow-Headers", asked or "Authorization, Content-Type"),
                ("Access-Control-Max-Age", _MAX_AGE_S),
            ]
            start_response("204 No Content", headers)
            return []

        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            # A function that has its own rules keeps them.
            if not any(name.lower() == "access-control-allow-origin" for name, _ in headers):
                exposed = [("Access-Control-Expose-Headers", _EXPOSED)] if may_read else []
                headers = [*headers, *cors_headers, *exposed]
            return start_response(status, headers, *rest)

        return app(environ, start)

    return call
