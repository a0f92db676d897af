"""A line on stderr for each request that a gateway has answered."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime, timedelta

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

MODEL, REQUEST_ID = "medusa.model", "medusa.request_id"  # where a request keeps them


class AccessLog(AbstractAccessLogger):
    """Writes the fields of a function's access log, and the model. ``log_format`` is text or json."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, seconds: float) -> None:
        began = datetime.fromtimestamp(time.time(), UTC) - timedelta(seconds=seconds)
        line = {
            "time": began.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "client": request.remote or "",
            "method": request.method,
            "path": request.path,
            "status": response.status,
            "bytes": response.body_length,
            "seconds": round(seconds, 6),
            "request_id": request.get(REQUEST_ID, ""),
            "model": request.get(MODEL, ""),
        }
        if self.log_format != "json":
            path = request.path.encode("unicode_escape").decode().replace(" ", "%20")
            text = "{time} {client} {method} {path} {status} {bytes} B {ms:.1f} ms {request_id} {model}"
            print(text.format_map(line | {"path": path, "ms": seconds * 1e3}).rstrip(), file=sys.stderr, flush=True)
            return
        print(json.dumps(line), file=sys.stderr, flush=True)
