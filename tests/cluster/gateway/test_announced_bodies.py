"""Bodies that a request announces before it sends them, to a real gateway."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator

import pytest
from cluster_stand_in import StandIn
from gateway_fixtures import NAME, GatewayProcess

_BODY = json.dumps({"model": "another", "prompt": "a"}).encode()


@pytest.fixture
def client(cluster: StandIn, start_gateway: Callable[..., GatewayProcess]) -> Iterator[socket.socket]:
    cluster.deploy(NAME)
    gateway = start_gateway("--max-body-mb", "1")
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection:
        yield connection


def _announce(client: socket.socket, size_bytes: int) -> bytes:
    """Announce a body, and return the first bytes of the answer."""
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: g",
        "Expect: 100-continue",
        f"Content-Length: {size_bytes}",
        "",
        "",
    )
    client.sendall("\r\n".join(lines).encode())
    return client.recv(65536)


def test_a_body_that_is_too_large_is_not_asked_for(client: socket.socket) -> None:
    assert _announce(client, 1_000_001).startswith(b"HTTP/1.1 413 ")


def test_any_other_body_is(client: socket.socket) -> None:
    assert _announce(client, len(_BODY)) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.sendall(_BODY)
    assert client.recv(65536).startswith(b"HTTP/1.1 404 ")


def test_another_expectation_is_refused(client: socket.socket) -> None:
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nExpect: more\r\nContent-Length: 5\r\n\r\n")
    assert client.recv(65536).startswith(b"HTTP/1.1 417 ")
