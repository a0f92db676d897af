"""A function's client of gateways: several threads and gateways that are away, and servers that are none."""

from __future__ import annotations

import http.server
import socket
import sys
import threading
from collections.abc import Iterator

import pytest
from medusa_cluster.remote.gateways import Address, Gateways
from medusa_runtime.errors import EngineError, UnreachableError


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_whose_gateways_are_away_all_learn_that(hasty_threads: None) -> None:
    taken = [socket.socket() for _ in range(3)]
    for one in taken:
        one.bind(("127.0.0.1", 0))  # and nobody listens
    gateways = Gateways([Address(False, "127.0.0.1", one.getsockname()[1]) for one in taken], None)
    others: list[Exception] = []

    def ask() -> None:
        for _ in range(300):
            try:
                gateways.post("/medusa/call", {})
            except UnreachableError:
                continue
            except Exception as error:  # noqa: BLE001  shown below
                others.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in taken:
        one.close()
    assert not others


@pytest.mark.parametrize("body", [b'{"detail":"Not Found"}', b"[]", b'{"error":"x"}', b"null", b"[" * 100_000])
def test_a_server_that_is_no_gateway_is_an_engine_that_fails(body: bytes) -> None:
    class NoGateway(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), NoGateway) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        gateways = Gateways([Address(False, "127.0.0.1", server.server_port)], None)
        with pytest.raises(EngineError, match="status 404"):
            gateways.ask("/medusa/describe", {"model": "m"})
