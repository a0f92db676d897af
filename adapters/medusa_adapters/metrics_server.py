"""/metrics on a port of its own, as of-watchdog has it, so that Prometheus needs no way through the function's port."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from medusa_handler.service import Service

logger = logging.getLogger(__name__)


def start(service: Service, host: str, port: int) -> None:
    """Serve in a thread; a port that is taken costs the metrics, not the function. Port 0: none."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer  # 15 ms

    from medusa_handler.exposition import exposition

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds a client may be silent

        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            body = exposition(service).encode() if found else b"there is only /metrics\n"
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
