"""The WSGI callable. It answers probes itself, checks the token, and hands all else to the Flask app.

Importing Flask costs 100 to 200 ms; a probe that arrives before it is there must not wait for it.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..faults import ApiError, not_ready
from ..http.environ import ARRIVAL, CALLER, ON_REQUEST_READ
from ..probes import ProbeResponse
from .tokens import Tokens

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from ..service import Service
    from .tracing import Tracer

_REPORTS = ("/metrics", "/timeline", "/openapi.json")  # these routes are not work, so they are never refused
_TOKEN_REQUIRED = ApiError(
    401, "expected the header Authorization: Bearer <token> with this server's token", code="invalid_api_key"
)
_PROBE_IS_READ_ONLY = ApiError(405, "a probe takes GET and HEAD alone", code="bad_method").body()


class WsgiGateway:
    """The WSGI callable. ``build`` makes the Flask app, and is called once."""

    def __init__(self, service: Service, build: Callable[[], WSGIApplication]) -> None:
        self._service = service
        self._build = build
        settings = service.settings
        self._tokens = Tokens(settings.token, settings.api_key_file)
        self.tracer: Tracer | None = None
        self._outermost: WSGIApplication = self._answer
        if settings.cors_origins is not None:
            from .cors import with_cors

            self._outermost = with_cors(self._outermost, settings.cors_origins)
        if settings.traces != "off":
            from .tracing import Tracer

            self.tracer = Tracer(service)
            self._outermost = self.tracer.around(self._outermost)
        if settings.access_log != "off":
            from .access_log import with_access_log

            self._outermost = with_access_log(self._outermost, settings.access_log)
        self._app: WSGIApplication | None = None
        self._building = threading.Lock()
        # Threads do not get a lock in the order in which they came, so each request has a number.
        self._arrivals = itertools.count()
        self._cap = service.settings.max_waiting + service.settings.max_concurrency
        self._room = threading.Semaphore(self._cap)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        return self._outermost(environ, start_response)

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if ON_REQUEST_READ in environ and environ.get("CONTENT_LENGTH", "0") in ("", "0") and not _is_chunked(environ):
            environ[ON_REQUEST_READ]()
        # We know no other protocol; werkzeug would refuse a client that offers to go on with WebSocket.
        environ.pop("HTTP_UPGRADE", None)
        probe = self._service.probes.answer(environ["PATH_INFO"])
        if probe is not None and environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            if isinstance(probe, ProbeResponse):
                status = "200 OK" if probe.good else "503 Service Unavailable"
                return _json(environ, start_response, status, probe.status)
            environ["PATH_INFO"] = probe  # the platform asks the function itself
        elif self._tokens.required and not self._has_token(environ):
            body = _TOKEN_REQUIRED.body_for(environ["PATH_INFO"])
            return _json(environ, start_response, "401 Unauthorized", body, ("WWW-Authenticate", "Bearer"))
        elif probe is not None:
            return _json(environ, start_response, "405 Method Not Allowed", _PROBE_IS_READ_ONLY, ("Allow", "GET, HEAD"))
        environ[ARRIVAL] = next(self._arrivals)
        if self._app is None and environ["PATH_INFO"] not in _REPORTS:
            # Each of these holds a thread until the app is there. Above the cap, they would take the probes' threads.
            if not self._room.acquire(blocking=False):
                return self._refuse(environ, start_response)
            try:
                self.app()
            finally:
                self._room.release()
        return self.app()(environ, start_response)

    def _has_token(self, environ: WSGIEnvironment) -> bool:
        caller = self._tokens.caller(environ.get("HTTP_AUTHORIZATION", ""), environ.get("HTTP_X_API_KEY", ""))
        environ[CALLER] = caller
        return caller is not None

    def app(self) -> WSGIApplication:
        """Return the Flask app; the first thread that needs it builds it."""
        with self._building:
            if self._app is None:
                self._app = self._build()
            return self._app

    def _refuse(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        service = self._service
        service.admission.refused += 1
        why = f"it is still starting, and {self._cap} requests wait for it already, as many as may"
        error = not_ready(why, service.model.eta_s())
        body = error.body_for(environ["PATH_INFO"]) if service.settings.handler is None else {"error": error.message}
        return _json(environ, start_response, "503 Service Unavailable", body, *error.headers.items())


def _is_chunked(environ: WSGIEnvironment) -> bool:
    return bool(environ.get("HTTP_TRANSFER_ENCODING"))


def _json(
    environ: WSGIEnvironment, start_response: StartResponse, status: str, value: Any, *headers: tuple[str, str]
) -> Iterable[bytes]:
    body = json.dumps(value).encode() + b"\n"
    start_response(
        status,
        [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            *headers,
        ],
    )
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]  # gunicorn would drop it, and log a warning
