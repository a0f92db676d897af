"""A web server on loopback that sends a checkpoint slowly."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path


class SlowOrigin(http.server.ThreadingHTTPServer):
    """Serves one folder with ranges, the weights at ``bytes_per_s`` a connection, counting the bytes it sent.

    ``shared``: all connections have so much together.
    """

    daemon_threads = True

    def __init__(self, folder: Path, bytes_per_s: float, *, shared: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Ranges)
        self.folder = folder
        self.bytes_per_s = bytes_per_s
        self.turn: contextlib.AbstractContextManager[object] = threading.Lock() if shared else contextlib.nullcontext()
        self.asked = 0  # requests so far
        self.sent = 0
        self.ranges: list[tuple[int, int]] = []  # of the weights, in the order in which they were asked for
        self.replaced = False
        self.down = False  # every connection is reset
        self.url = f"http://127.0.0.1:{self.server_port}/model"


class _Ranges(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SlowOrigin

    def do_GET(self) -> None:
        self.server.asked += 1
        self._check_up()
        path = self.server.folder / self.path.removeprefix("/model/")
        if not path.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = path.read_bytes()
        start, stop, status = 0, len(data), 200
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop, status = int(first), min(int(last or len(data) - 1) + 1, len(data)), 206
        if path.suffix == ".safetensors":
            self.server.ranges.append((start, stop))
        etag = '"two"' if self.server.replaced else '"one"'
        if self.headers.get("If-Match") not in (None, etag):
            status, start, stop = 412, 0, 0
        self.send_response(status)
        self.send_header("ETag", etag)
        self.send_header("Content-Length", str(stop - start))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.end_headers()
        step = max(min(1 << 16, int(self.server.bytes_per_s / 2)), 1)
        for at in range(start, stop, step):
            piece = data[at : min(at + step, stop)]
            with self.server.turn:
                if path.suffix == ".safetensors":  # first, for a new connection must not bring a piece at once
                    time.sleep(len(piece) / self.server.bytes_per_s)
                    self._check_up()
                self.server.sent += len(piece)
            self.wfile.write(piece)

    do_HEAD = do_GET

    def _check_up(self) -> None:
        if self.server.down:
            raise ConnectionResetError

    def log_message(self, *_: object) -> None: ...

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            pass


class SlowAfterAWhile(SlowOrigin):
    """Sends the headers and small files at once, and from the first megabyte on next to nothing, while it is slow."""

    slow = True
    fast_bytes, slow_bytes_per_s = 1e6, 2e4

    @property
    def bytes_per_s(self) -> float:
        return self.slow_bytes_per_s if self.slow and self.sent > self.fast_bytes else 1e9

    @bytes_per_s.setter
    def bytes_per_s(self, value: float) -> None:
        self.slow = value < 1e9


@contextlib.contextmanager
def serving_origin(folder: Path, bytes_per_s: float, kind: type[SlowOrigin] = SlowOrigin) -> Iterator[SlowOrigin]:
    with kind(folder, bytes_per_s) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
