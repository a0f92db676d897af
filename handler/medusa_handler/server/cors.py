"""Cross-origin requests (CORS, the Fetch standard): which web pages may call this server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_METHODS = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
_EXPOSED = "X-Request-Id, Retry-After, Server-Timing"
_MAX_AGE_S = "600"
_ORIGIN = re.compile(rb"\r\norigin:[ \t]*([!-~]*)[ \t]*(?=\r\n)", re.IGNORECASE)


def sharing(origins: str) -> Callable[[str], list[tuple[str, str]]]:
    """Return a function that maps a page's origin to the headers of the answer.

    If it is one of ``origins`` (``*`` or a list with commas), the headers let the page read the answer.
    """
    allowed = frozenset(origin.strip().rstrip("/") for origin in origins.split(","))

    def headers(origin: str) -> list[tuple[str, str]]:
        # A cache must not give a page the answer that another page, or a client without an origin, was given.
        shared = [("Vary", "Origin")]
        if origin and (origin in allowed or "*" in allowed):
            shared.append(("Access-Control-Allow-Origin", "*" if "*" in allowed else origin))
        return shared

    return headers


def head_sharing(origins: str, data: bytes) -> list[tuple[str, str]]:
    """Return the headers of the answer to a request of which only ``data`` has come: its head, or a part of it."""
    found = _ORIGIN.findall(data.partition(b"\r\n\r\n")[0] + b"\r\n")
    shared = sharing(origins)(found[0].decode() if len(found) == 1 else "")
    return [*shared, ("Access-Control-Expose-Headers", _EXPOSED)] if len(shared) > 1 else shared


def with_cors(app: WSGIApplication, origins: str) -> WSGIApplication:
    """Wrap ``app``: answer preflights, and let these origins (``*`` or a list with commas) read the answers."""
    shared_with = sharing(origins)

    def call(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        shared = shared_with(environ.get("HTTP_ORIGIN", ""))
        may_read = len(shared) > 1
        if may_read and environ["REQUEST_METHOD"] == "OPTIONS" and "HTTP_ACCESS_CONTROL_REQUEST_METHOD" in environ:
            asked = environ.get("HTTP_ACCESS_CONTROL_REQUEST_HEADERS", "")
            headers = [
                *shared,
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
                headers = [*headers, *shared, *exposed]
            return start_response(status, headers, *rest)

        return app(environ, start)

    return call
