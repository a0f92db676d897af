"""/metrics on a port of its own, as of-watchdog has it, so that Prometheus needs no way through the function's port."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from medusa_handler.service import Service

logger = logging.getLogger(__name__)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Calls:
    """Counts under the names that of-watchdog has given, which dashboards know."""

    def __init__(self) -> None:
        from medusa_handler.metrics import Histogram

        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}
        self._seconds = Histogram("http_request_duration_seconds", "Until the head of the answer.", _SECONDS)

    def count(self, method: str, code: int, seconds: float) -> None:
        self._seconds.observe(seconds)
        with self._lock:
            key = (str(code), method)
            self._counts[key] = self._counts.get(key, 0) + 1

    def page(self, in_flight: int) -> str:
        from medusa_handler.metrics import gauge

        with self._lock:
            counts = sorted(self._counts.items())
        samples = [((("code", code), ("method", method)), count) for (code, method), count in counts]
        lines = [
            *gauge("http_requests_total", "Calls by status and method.", *samples),
            *gauge("http_requests_in_flight", "Calls that are not answered yet.", ((), in_flight)),
            *self._seconds.lines(),
        ]
        return "\n".join(lines) + "\n"


def start(service: Service, calls: Calls, host: str, port: int) -> None:
    """Serve in a thread; a port that is taken costs the metrics, not the function. Port 0: none."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer  # 15 ms

    from medusa_handler.exposition import exposition

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds a client may be silent

        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            body = (
                (exposition(service) + calls.page(service.admission.in_flight)).encode()
                if found
                else b"there is only /metrics\n"
            )
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    if not port:
        return
    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        logger.warning("no metrics on port %d: %s", port, error.strerror)
        return
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
