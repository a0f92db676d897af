"""Heads and bodies of bytes that no proper client sends: they are refused or passed on, and are no faults of ours."""

from __future__ import annotations

import json
import socket
import zlib
from collections.abc import Callable

import pytest
from cluster_stand_in import StandIn
from gateway_fixtures import NAME, GatewayProcess, Instance

Start = Callable[..., GatewayProcess]
BODY = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 1}).encode()


@pytest.mark.parametrize(
    ("head", "body", "expected"),
    [
        (b"X-Request-Id: \xff\xfe\r\nContent-Length: %d" % len(BODY), BODY, b"200"),
        (b"Traceparent: \xed\xa0\x80\r\nContent-Length: %d" % len(BODY), BODY, b"200"),
        (b"Transfer-Encoding: chunked", b"5\r\nabc\r\nzz\r\n\r\n", b"400"),
        (b"Transfer-Encoding: chunked", b"2\r\n{}\r\nnothing\r\n\r\n", b"400"),
        (b"Content-Encoding: gzip\r\nContent-Length: 9", b"not gzip!", b"415"),
        (b"Content-Encoding: deflate\r\nContent-Length: %d" % len(zlib.compress(BODY)), zlib.compress(BODY), b"415"),
        (b"Content-Encoding: identity\r\nContent-Length: %d" % len(BODY), BODY, b"200"),
    ],
)
def test_odd_bytes_are_no_internal_errors(
    start_gateway: Start, cluster: StandIn, served: tuple[Instance, ...], head: bytes, body: bytes, expected: bytes
) -> None:
    cluster.deploy(NAME)
    cluster.add(NAME, "one", served[0].url)
    gateway = start_gateway()
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: g\r\n" + head + b"\r\n\r\n" + body)
        answer = connection.recv(65536)
    assert answer.split(b" ")[1] == expected
    assert "failed" not in gateway.output()
