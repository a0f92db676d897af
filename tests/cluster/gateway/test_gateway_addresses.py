"""A function's client of gateways, and a gateway's of node servers: those that are away, and servers that are none."""

from __future__ import annotations

import asyncio
import http.server
import socket
import sys
import threading
from collections.abc import Iterator

import pytest
from aiohttp import ClientSession, web
from medusa_cluster.gateway.controller_api import NodeServers
from medusa_cluster.remote.gateways import Address, Gateways
from medusa_runtime.errors import EngineError, NoControllerError, UnreachableError


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


def test_a_gateway_asks_a_few_node_servers_at_once_and_the_others_later() -> None:
    """Each asks the head's in turn, which a large cluster would flood while the controller is away."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.host)
        return web.json_response({"error": {"code": "Cluster.NoController", "message": "away"}}, status=503)

    async def scenario() -> None:
        app = web.Application()
        app.router.add_post("/cluster/status", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        with socket.create_server(("0.0.0.0", 0)) as listener:
            await web.SockSite(runner, listener).start()
            port = listener.getsockname()[1]
            urls = [f"http://127.0.0.{number}:{port}" for number in range(1, 21)]
            async with ClientSession() as session:
                servers = NodeServers(session, urls, {}, name="g", url="http://g")
                for _ in range(3):
                    with pytest.raises(NoControllerError):
                        await servers.status()
            await runner.cleanup()
        assert len(asked) == 3 * 8
        assert len(set(asked)) == len(urls)

    asyncio.run(scenario())
