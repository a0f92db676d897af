"""The WSGI callable. Answers probes by itself and hands everything else to the Flask app.

Importing Flask costs 100 to 200 ms; a probe that arrives before it is there must not wait for it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .service import Service

Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

LIVE, READY = "live", "ready"
PROBES = {"/livez": LIVE, "/startupz": READY, "/readyz": READY}


class Front:
    """``probes`` maps further paths, which a platform asks for, to LIVE or READY."""

    def __init__(self, service: Service, build: Callable[[], Wsgi], probes: Mapping[str, str]) -> None:
        self._service = service
        self._build = build
        self._probes = {**PROBES, **probes}
        self._app: Wsgi | None = None
        self._building = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        probe = self._probes.get(environ["PATH_INFO"])
        if probe is not None and environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return self._answer(probe, start_response)
        return self.app()(environ, start_response)

    def app(self) -> Wsgi:
        """The Flask app, built by whoever needs it first."""
        with self._building:
            if self._app is None:
                self._app = self._build()
            return self._app

    def _answer(self, probe: str, start_response: Callable[..., Any]) -> Iterable[bytes]:
        good, status = True, {"status": "alive"}
        if probe == READY:
            good = self._service.ready and not self._service.draining.is_set()
            status = self._service.status()
        body = json.dumps(status).encode() + b"\n"
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
        ]
        start_response("200 OK" if good else "503 Service Unavailable", headers)
        return [body]
