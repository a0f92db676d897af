"""Processes killed and origins misbehaving in the middle of a start."""

from __future__ import annotations

import http.server
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]


class SlowOrigin(http.server.ThreadingHTTPServer):
    """Serves one folder with ranges, the weights at ``bytes_per_s`` a connection, counting the bytes it sent."""

    daemon_threads = True

    def __init__(self, folder: Path, bytes_per_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Ranges)
        self.folder = folder
        self.bytes_per_s = bytes_per_s
        self.sent = 0
        self.replaced = False
        self.url = f"http://127.0.0.1:{self.server_port}/model"


class _Ranges(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SlowOrigin

    def do_GET(self) -> None:
        path = self.server.folder / self.path.rpartition("/")[2]
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
        etag = '"two"' if self.server.replaced else '"one"'
        if self.headers.get("If-Match") not in (None, etag):
            status, start, stop = 412, 0, 0
        self.send_response(status)
        self.send_header("ETag", etag)
        self.send_header("Content-Length", str(stop - start))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.end_headers()
        step = 1 << 16
        for at in range(start, stop, step):
            piece = data[at : min(at + step, stop)]
            self.wfile.write(piece)
            self.server.sent += len(piece)
            if path.suffix == ".safetensors":
                time.sleep(len(piece) / self.server.bytes_per_s)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            pass


@pytest.fixture
def slow_origin(example: Path) -> Iterator[SlowOrigin]:
    with SlowOrigin(example, bytes_per_s=1e6) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_progress_is_visible_while_a_slow_origin_sends(start: Start, slow_origin: SlowOrigin) -> None:
    serving = start("--model", slow_origin.url)
    seen = []
    while (answer := serving.request("GET", "/readyz"))[0] == 503:
        seen.append(answer[1])
        time.sleep(0.05)
    assert any(0 < progress.get("fetched_bytes", 0) < progress.get("total_bytes", 0) for progress in seen), seen[-3:]
    assert serving.complete()["choices"][0]["text"]
    assert serving.stop() == 0


def test_a_killed_prefetcher_is_replaced_and_nothing_is_fetched_twice(
    start: Start, slow_origin: SlowOrigin, example: Path
) -> None:
    serving = start("--model", slow_origin.url)
    while serving.request("GET", "/readyz")[1].get("fetched_bytes", 0) == 0:
        time.sleep(0.02)
    os.kill(serving.child("prefetcher"), signal.SIGKILL)
    slow_origin.bytes_per_s = 1e9
    assert serving.complete()["choices"][0]["text"]
    reference = start("--model", example)
    assert serving.complete(max_tokens=20)["choices"] == reference.complete(max_tokens=20)["choices"]
    assert reference.stop() == 0
    assert serving.stop() == 0


def test_an_object_replaced_while_it_is_read_is_an_error(start: Start, slow_origin: SlowOrigin) -> None:
    slow_origin.bytes_per_s = 3e5
    serving = start("--model", slow_origin.url)
    while serving.request("GET", "/readyz")[1].get("total_bytes", 0) == 0:
        time.sleep(0.02)
    slow_origin.replaced = True
    slow_origin.bytes_per_s = 1e9
    os.kill(serving.child("prefetcher"), signal.SIGKILL)
    assert serving.wait_gone() != 0
    assert "Storage.Changed" in serving.output()


@pytest.mark.parametrize("name", ["zygote", "engine"])
def test_a_process_killed_during_the_start_is_replaced(start: Start, slow_origin: SlowOrigin, name: str) -> None:
    serving = start("--model", slow_origin.url)
    pid = serving.child(name)
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    assert serving.complete()["choices"][0]["text"]
    assert serving.stop() == 0


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.4, 0.8, 1.6])
def test_sigterm_in_every_phase_of_the_start(start: Start, slow_origin: SlowOrigin, delay_s: float) -> None:
    serving = start("--model", slow_origin.url)
    if delay_s:
        assert serving.port
        time.sleep(delay_s)
    assert serving.stop() in (0, -signal.SIGTERM, 143)
