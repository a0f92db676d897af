"""Peers that lie, refuse, hang or have something else: found out, named, and not used."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from medusa_runtime.errors import MedusaError
from medusa_runtime.node.client import NodeClient
from peer_nodes import Model, Node
from scripted_server import ScriptedServer
from waiting import until


class Between(http.server.ThreadingHTTPServer):
    """Passes requests on to a node, and changes what it answers to those for weights."""

    daemon_threads = True

    def __init__(self, node: Node, change: Callable[[bytearray], bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.node, self.change = node, change
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Between

    def do_GET(self) -> None:
        connection = http.client.HTTPConnection(self.server.node.host, self.server.node.port)
        connection.request("GET", self.path, headers=dict(self.headers.items()))
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        announced = len(body)
        if "/shards/" in self.path:
            body = self.server.change(bytearray(body))
        self.send_response(answer.status)
        for name, value in {**dict(answer.getheaders()), "Content-Length": str(announced)}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)
        self.close_connection = len(body) < announced

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def between() -> Iterator[Callable[..., Between]]:
    servers: list[Between] = []

    def start(node: Node, change: Callable[[bytearray], bytes]) -> Between:
        servers.append(Between(node, change))
        threading.Thread(target=servers[-1].serve_forever, args=(0.05,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def _flip(body: bytearray) -> bytes:
    body[len(body) // 2] ^= 0x10
    return bytes(body)


def _lie_of_sizes(body: bytearray) -> bytes:
    body[0:4] = (1000).to_bytes(4, "little")
    return bytes(body)


def _cut(body: bytearray) -> bytes:
    return bytes(body[: len(body) // 3])


def _noise(body: bytearray) -> bytes:
    return os.urandom(len(body))


@pytest.mark.parametrize("change", [_flip, _lie_of_sizes, _noise])
def test_wrong_bytes_are_found_out_not_used_and_named(
    nodes: Callable[..., list[Node]], model: Model, between: Callable[..., Between], change: Callable[..., bytes]
) -> None:
    first, second = nodes(2)
    model.check(first.fetch(model.url))
    liar = between(first, change)
    second.read_from(liar.url, first)
    model.check(second.fetch(model.url))
    found = second.held()["sources"]
    assert "it sends wrong bytes" in found["excluded"][liar.url]
    assert found["received_bytes"]["store"] == 0
    assert second.output().count(f"{liar.url} is not asked any more") == 1


def test_answers_that_end_early_go_on_elsewhere(
    nodes: Callable[..., list[Node]], model: Model, between: Callable[..., Between]
) -> None:
    first, second = nodes(2)
    model.check(first.fetch(model.url))
    second.read_from(between(first, _cut).url, first)
    model.check(second.fetch(model.url))
    assert second.held()["sources"]["received_bytes"]["store"] == 0


def test_a_peer_with_another_token_is_not_used(
    nodes: Callable[..., list[Node]], model: Model, token_file: Path
) -> None:
    (first,) = nodes(1)
    model.check(first.fetch(model.url))
    token_file.write_text("another token of this cluster, of which first knows nothing".replace(" ", "-"))
    (second,) = nodes(1)
    second.read_from(first)
    model.check(second.fetch(model.url))
    assert "refuses this cluster's token" in second.held()["sources"]["excluded"][first.url]
    assert model.copies() > 1.9


def test_an_older_version_is_not_spread(nodes: Callable[..., list[Node]], model: Model) -> None:
    first, second = nodes(2)
    model.check(first.fetch(model.url))
    model.replace()
    second.read_from(first)
    model.check(second.fetch(model.url))
    assert "older version" in second.held()["sources"]["excluded"][first.url]


def test_a_node_that_has_fetched_the_new_version_serves_it(nodes: Callable[..., list[Node]], model: Model) -> None:
    first, second, third = nodes(3)
    model.check(first.fetch(model.url))
    second.read_from(first)
    model.check(second.fetch(model.url))  # first's server holds the region for a while after that
    model.replace()
    model.check(first.clients[0].region(model.url, fresh=True))
    third.read_from(first, second)
    model.check(third.fetch(model.url))
    assert third.held()["sources"]["received_bytes"][first.url] == len(model.data)


def test_a_peer_that_never_answers_is_left_behind(nodes: Callable[..., list[Node]], model: Model) -> None:
    first, second = nodes(2)
    model.check(first.fetch(model.url))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        second.read_from(f"http://127.0.0.1:{silent.getsockname()[1]}", first)
        model.check(second.fetch(model.url))
    assert second.held()["sources"]["received_bytes"][first.url] == len(model.data)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nMedusa-Chunk-Bytes: 262144\r\n\r\n\xff\xff\xff\xff",
        b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"220 mail.example.com ready\r\n\r\n",
        b"HTTP/1.1 500 no\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_what_is_no_index_is_left_out(nodes: Callable[..., list[Node]], model: Model, answer: bytes) -> None:
    (node,) = nodes(1)
    with ScriptedServer(lambda _: answer) as server:
        node.read_from(server.url, "http://127.0.0.1:1", "ftp://no/peer", "http://[/")
        model.check(node.fetch(model.url))
    assert model.copies() < 1.05


def test_models_that_wait_for_their_stores_hold_up_no_other(nodes: Callable[..., list[Node]], model: Model) -> None:
    (node,) = nodes(1)
    model.check(node.fetch(model.url))
    answered: list[str] = []

    def ask(url: str) -> None:
        connection = http.client.HTTPConnection(node.host, node.port)
        headers = {"Authorization": f"Bearer {node.token_file.read_text().strip()}"}
        with contextlib.closing(connection):
            connection.request("GET", f"/regions/{quote(url, safe='')}/index", headers=headers)
            assert connection.getresponse().status == (200 if url == model.url else 404)
            answered.append(url)

    def fetch(url: str) -> None:
        client = NodeClient(node.socket)
        with contextlib.closing(client), contextlib.suppress(MedusaError):
            client.region(url, background=True)

    statuses = NodeClient(node.socket)
    with (
        contextlib.closing(statuses),
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):  # takes connections and answers none
        urls = [f"http://127.0.0.1:{silent.getsockname()[1]}/m{number}" for number in range(6)]
        fetching = [threading.Thread(target=fetch, args=(url,)) for url in urls]
        for one in fetching:
            one.start()
        until(lambda: {region["url"] for region in statuses.status()["regions"]} >= set(urls))
        asking = [threading.Thread(target=ask, args=(url,)) for url in (*urls, model.url)]
        for one in asking:
            one.start()
            time.sleep(0.05)  # so that they come in this order
        asking[-1].join()
        assert answered == [model.url]
        node.agent.terminate()  # so that nobody waits any more
        for one in (*asking, *fetching):
            one.join()
