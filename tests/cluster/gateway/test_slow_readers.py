"""Clients that take nothing of a large answer."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from cluster_stand_in import StandIn
from gateway_fixtures import NAME, GatewayProcess, until

Start = Callable[..., GatewayProcess]
_ANSWER = json.dumps({"data": "x" * (24 << 20)}).encode()  # more than sockets hold
_REQUEST = json.dumps({"model": NAME, "input": "text"}).encode()


class _Large(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(_ANSWER)))
        self.end_headers()
        self.wfile.write(_ANSWER)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def instance(cluster: StandIn) -> Iterator[None]:
    """An instance of the model that gives a large answer to everything."""
    cluster.deploy(NAME)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Large) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        cluster.add(NAME, "one", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


def ask(gateway: GatewayProcess) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", gateway.port), timeout=60)
    length = str(len(_REQUEST)).encode()
    client.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: g\r\nContent-Length: " + length + b"\r\n\r\n" + _REQUEST)
    return client


@pytest.mark.usefixtures("instance")
def test_a_client_that_takes_nothing_of_a_whole_answer_is_closed(start_gateway: Start) -> None:
    gateway = start_gateway("--write-timeout-s", "0.5")
    with ask(gateway):
        until(
            lambda: gateway.metric("medusa_gateway_requests_total", route="/v1/embeddings", status="499") == 1,
            gateway.output,
        )


@pytest.mark.usefixtures("instance")
def test_a_large_answer_comes_whole(start_gateway: Start) -> None:
    gateway = start_gateway()
    assert gateway.post("/v1/embeddings", json.loads(_REQUEST)) == (200, json.loads(_ANSWER))
