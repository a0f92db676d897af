"""/metrics on a port of its own, as in of-watchdog, so that Prometheus need not use the function's port."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

from medusa_runtime.errors import MedusaError
from medusa_runtime.process import hang_up
from medusa_runtime.prometheus import Histogram, gauge

logger = logging.getLogger(__name__)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_MOST_CONNECTIONS = 16  # each has a thread; one more ends the oldest
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class CallMetrics:
    """Counts of calls under of-watchdog's names and labels, which dashboards know."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[tuple[str, str], Histogram] = {}  # by status and method

    def count(self, method: str, code: int, seconds: float) -> None:
        # Clients invent methods, and each would add twenty lines to the page.
        key = (str(code), method.lower() if method in _METHODS else "unknown")
        with self._lock:
            if key not in self._seconds:
                labels = (("code", key[0]), ("method", key[1]))
                text = "Seconds from a request's arrival to the head of its answer."
                self._seconds[key] = Histogram("http_request_duration_seconds", text, _SECONDS, labels)
        self._seconds[key].observe(seconds)

    def page(self, in_flight: int) -> str:
        with self._lock:
            histograms = [self._seconds[key] for key in sorted(self._seconds)]
        samples = [(histogram.labels, histogram.count) for histogram in histograms]
        lines = [
            *gauge("http_requests_total", "Calls by status and method.", *samples),
            *gauge("http_requests_in_flight", "Calls that are not answered yet.", ((), in_flight)),
        ]
        if histograms:
            lines += histograms[0].lines(*histograms[1:])
        return "\n".join(lines) + "\n"


def serve(page: Callable[[], str], host: str, port: int) -> None:
    """Serve what ``page`` returns, in a thread; with port 0 do nothing.

    If the port is taken, there are no metrics, but the function runs.
    """
    if not port:
        return
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        logger.warning("no metrics on port %d: %s", port, error.strerror)
        return
    threading.Thread(target=serve_forever, args=(page, listener), name="metrics", daemon=True).start()


def serve_forever(page: Callable[[], str], listener: socket.socket) -> None:
    """Answer ``GET /metrics`` with what ``page`` returns, or 503 if it raises a MedusaError."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer  # 15 ms

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds a client may be silent

        def do_GET(self) -> None:
            try:
                found = self.path.partition("?")[0] == "/metrics"
                status, text = (200, page()) if found else (404, "there is only /metrics\n")
            except MedusaError as error:
                status, text = 503, f"{error}\n"
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        """A server for everyone who reaches the port, so that nobody can hold more than a few threads."""

        def __init__(self) -> None:
            self._lock = threading.Lock()
            self._open: dict[socket.socket, None] = {}  # the oldest first
            super().__init__(("", 0), Handler, bind_and_activate=False)
            self.socket.close()
            self.socket = listener

        def process_request(self, request: Any, client_address: Any) -> None:
            with self._lock:
                if len(self._open) >= _MOST_CONNECTIONS:
                    hang_up(oldest := next(iter(self._open)))
                    del self._open[oldest]
                self._open[request] = None
            super().process_request(request, client_address)

        def shutdown_request(self, request: Any) -> None:
            with self._lock:
                self._open.pop(request, None)
            super().shutdown_request(request)

        def handle_error(self, *_: object) -> None: ...  # of a client that left, whose traceback could fill the log

    Server().serve_forever()
