"""Clients that take nothing of a large answer."""

from __future__ import annotations

import asyncio
import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from aiohttp import web
from cluster_stand_in import StandIn
from gateway_fixtures import NAME, GatewayProcess
from medusa_cluster.gateway import server as gateway_server
from medusa_cluster.gateway.instance_response import Answer
from waiting import until

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


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_takes_a_large_answer_slowly_is_closed(monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    """It takes a piece before each time limit, and so would keep the answer in memory for hours.

    If a gateway waits too long for one that takes a stream so, its instance ends the stream, and seems to be lost.
    """
    body = b"x" * (24 << 20)
    monkeypatch.setattr(gateway_server, "_LEAST_BYTES_PER_S", 24 << 20)
    ended: list[BaseException] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        client = gateway_server._Client(request, 4.0)
        try:
            if not streams:
                return await client.send_whole(Answer(200, {}, body))
            await client.begin({"Content-Type": "text/event-stream"})
            for _ in range(24):
                await client.send(b"x" * (1 << 20))
            return await client.end()
        except ConnectionError as error:
            ended.append(error)
            raise asyncio.CancelledError from None
        finally:
            client.close()

    async def main() -> float:
        app = web.Application()
        app.router.add_get("/", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        loop, began = asyncio.get_running_loop(), time.monotonic()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
            client.connect(runner.addresses[0])
            client.sendall(b"GET / HTTP/1.1\r\nHost: g\r\n\r\n")
            client.setblocking(False)
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(20):
                    while not ended:
                        await loop.sock_recv(client, 1 << 18)
                        await asyncio.sleep(0.1)
        await runner.cleanup()
        return time.monotonic() - began

    assert asyncio.run(main()) < 15
    assert "too slowly" in str(ended[0])
