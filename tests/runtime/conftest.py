"""A web server on loopback that fails on demand, checkpoints to serve from it, and a fake CUDA driver."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_driver import fake_cuda
from medusa_runtime.region.reader import Region


class FaultyOrigin(http.server.ThreadingHTTPServer):
    """Serves ``objects`` with ranges, ETags and If-Match. ``faults[path]`` is used up one a request, in order.

    Faults: "500", "503", "429", "403" (a status) · "cut:N" (N bytes, then the connection breaks) · "short:N" (announces
    only N bytes) · "full" (ignores Range) · "shift" (another range than asked for) · "stall" (half, then nothing) ·
    "silent" (a head, then nothing) · "replace" (the object changes in front of this answer) · "garbage" (no HTTP) ·
    "flip" (one bit of the body is wrong) · "turn" (a few bytes; wrong ones once ``turned`` is set; then nothing)
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self._tags: dict[str, tuple[bytes, str]] = {}
        self.faults: dict[str, list[str]] = {}
        self.requests: list[tuple[str, int, int, dict[str, str]]] = []
        self.retry_after: str | None = None
        self.etags = True
        self.bytes_per_s: float | None = None
        self.shared_bytes_per_s: float | None = None  # of all connections together, as over one slow link
        self.sent_bytes = 0  # of bodies
        self.wire = threading.Lock()
        self.accept: Callable[[dict[str, str], str], bool] = lambda headers, path: True
        self.redirects: dict[str, str] = {}
        self.stopping = threading.Event()
        self.turned = threading.Event()
        self.hanging = 0  # answers that stall or are silent now
        self.gave_up = 0  # those that were waited for until the origin closed the connection
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.lock = threading.Lock()

    def put(self, path: str, body: bytes) -> None:
        self.objects[path] = body

    def etag(self, path: str) -> str:
        """That of the object now; it is computed once, because objects are asked for in many ranges."""
        data = self.objects[path]
        found = self._tags.get(path)
        if found is None or found[0] is not data:
            found = self._tags[path] = (data, f'"{hashlib.md5(data).hexdigest()}"')
        return found[1]

    def asked(self, path: str) -> list[tuple[int, int]]:
        return [(start, stop) for name, start, stop, _ in self.requests if name == path]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyOrigin

    def do_GET(self) -> None:
        origin, path = self.server, self.path.partition("?")[0]
        start, stop = 0, 1 << 62
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = int(first), int(last) + 1
        with origin.lock:
            origin.requests.append((path, start, stop, {k.lower(): v for k, v in self.headers.items()}))
            fault = origin.faults.get(path, [])
            fault = fault.pop(0) if fault else ""
        if fault == "replace":
            origin.objects[path] = origin.objects[path][::-1]
        if fault == "garbage":
            self.wfile.write(b"220 mail.example.com ready\r\n\r\n")
            self.close_connection = True
            return
        if path in origin.redirects:
            self._plain(302, {"Location": origin.redirects[path]})
        elif fault.isdigit():
            self._plain(int(fault), {"Retry-After": origin.retry_after} if origin.retry_after else {})
        elif not origin.accept({k.lower(): v for k, v in self.headers.items()}, self.path):
            self._plain(403, {})
        elif path not in origin.objects:
            self._plain(404, {})
        else:
            self._object(origin.objects[path], origin.etag(path), start, stop, fault)

    def _object(self, data: bytes, etag: str, start: int, stop: int, fault: str) -> None:
        if self.headers.get("If-Match") not in (None, etag):
            self._plain(412, {})
            return
        if start >= len(data) and self.headers.get("Range"):
            self._plain(416, {"Content-Range": f"bytes */{len(data)}"})
            return
        stop = min(stop, len(data))
        kind, _, number = fault.partition(":")
        if kind == "shift":
            start, stop = start + 1, stop + 1
        body = data[start:stop]
        status = 206 if self.headers.get("Range") else 200
        if kind == "full":
            status, body = 200, data
        if kind == "flip":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if kind == "short":
            body = body[: int(number)]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if self.server.etags:
            self.send_header("ETag", etag)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{len(data)}")
        self.end_headers()
        sent = {"cut": int(number or 0), "stall": len(body) // 2, "silent": 0, "turn": 1000}.get(kind, len(body))
        self._send(body[:sent])
        if kind == "turn" and self.server.turned.wait(60):
            self._send(bytes(each ^ 0xFF for each in body[sent : sent + (500 << 10)]))
        if kind in ("stall", "silent", "turn"):
            self.server.hanging += 1
            if not self.server.stopping.wait(60):
                self.server.gave_up += 1
            self.server.hanging -= 1
        if kind in ("cut", "stall", "silent", "turn"):
            self.close_connection = True

    def _send(self, body: bytes) -> None:
        step = 1 << 16
        for at in range(0, len(body), step):
            piece = body[at : at + step]
            if self.server.shared_bytes_per_s:
                with self.server.wire:
                    time.sleep(len(piece) / self.server.shared_bytes_per_s)
            self.wfile.write(piece)
            with self.server.lock:
                self.server.sent_bytes += len(piece)
            if self.server.bytes_per_s:
                time.sleep(len(piece) / self.server.bytes_per_s)

    def _plain(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, ValueError):
            pass


@pytest.fixture
def origin() -> Iterator[FaultyOrigin]:
    with FaultyOrigin() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.stopping.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def region() -> Iterator[Region]:
    """An empty region."""
    region = Region.create()
    yield region
    region.close()


def _safetensors(tensors: dict[str, tuple[str, list[int], bytes]], pad: int = 8) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % pad)
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())


@pytest.fixture(scope="session")
def safetensors_file() -> Callable[..., bytes]:
    """Bytes of a safetensors file from name → (dtype, shape, data)."""
    return _safetensors


__all__ = ["fake_cuda"]
