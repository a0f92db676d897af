"""Clients that want a gateway's memory, its log or its models, over raw sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_stand_in import StandIn
from gateway_fixtures import NAME, GatewayProcess, peak_mb, resident_mb
from medusa_cluster.gateway.call import parse_call
from waiting import until

Start = Callable[..., GatewayProcess]
_CHUNK = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"


def send(gateway: GatewayProcess, head: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", gateway.port), timeout=30)
    connection.sendall(head)
    return connection


def test_bodies_in_chunks_that_never_end_have_a_budget(start_gateway: Start) -> None:
    gateway = start_gateway()
    before_mb = resident_mb(gateway.process.pid)
    with contextlib.ExitStack() as stack:
        refused = 0
        for _ in range(24):
            head = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n"
            connection = stack.enter_context(send(gateway, head))
            with contextlib.suppress(OSError):  # it answers and closes before all has been sent
                for _ in range(28):
                    connection.sendall(_CHUNK)
            connection.settimeout(0.2)
            with contextlib.suppress(TimeoutError, ConnectionError):
                refused += b"body_memory" in connection.recv(4096)
        assert refused > 0
        assert resident_mb(gateway.process.pid) - before_mb < 512 + 150
        assert gateway.get("/readyz")[0] == 200
    until(lambda: gateway.exchange("POST", "/v1/completions", {"model": "none", "prompt": "a" * 20_000_000})[0] == 404)


def test_lengths_that_are_only_announced_take_no_room_from_others(start_gateway: Start) -> None:
    gateway = start_gateway()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 31000000\r\n\r\n{"
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(send(gateway, head))
        assert gateway.exchange("POST", "/v1/completions", {"model": "none", "prompt": "a" * 20_000_000})[0] == 404


def test_a_body_of_too_many_values_is_not_parsed(start_gateway: Start) -> None:
    gateway = start_gateway()
    body = b'{"model":"none","prompt":[' + b"[]," * 4_000_000 + b"[]]}"
    status, answer = gateway.exchange("POST", "/v1/completions", body)[:2]
    assert status == 413, answer
    assert peak_mb(gateway.process.pid) < 300


def test_tokens_of_any_bytes_are_refused_without_a_word_in_the_log(start_gateway: Start, tmp_path: Path) -> None:
    token = tmp_path / "client"
    token.write_text("secret" * 4 + "\n")
    token.chmod(0o600)
    gateway = start_gateway("--client-token-file", str(token))
    for given in (b"Bearer \xff\xfe", b"\xed\xa0\x80", b"Bearer", b"Bearer secret", b"secret" * 4 + b"x"):
        with send(gateway, b"GET /metrics HTTP/1.1\r\nHost: g\r\nAuthorization: " + given + b"\r\n\r\n") as connection:
            assert connection.recv(4096).split(b" ")[1] in (b"401", b"400")
    for path in (
        b"/livez/../metrics",
        b"/livez%2f..%2fmetrics",
        b"//metrics",
        b"/LIVEZ",
        b"/readyz/",
        b"http://h/metrics",
    ):
        with send(gateway, b"GET " + path + b" HTTP/1.1\r\nHost: g\r\n\r\n") as connection:
            assert connection.recv(4096).split(b" ")[1] == b"401", path
    assert "internal" not in gateway.output()


def test_a_head_without_end_takes_no_memory(start_gateway: Start) -> None:
    gateway = start_gateway()
    before_mb = resident_mb(gateway.process.pid)
    with send(gateway, b"GET /livez HTTP/1.1\r\nHost: g\r\n") as connection, contextlib.suppress(ConnectionError):
        for number in range(20_000):
            connection.sendall(b"X-%d: " % number + b"y" * 4000 + b"\r\n")
    assert resident_mb(gateway.process.pid) - before_mb < 20


def test_bodies_of_requests_that_wait_take_their_size_once(cluster: StandIn, start_gateway: Start) -> None:
    cluster.deploy(NAME)  # there is no instance, so its requests wait
    gateway = start_gateway()
    body = json.dumps({"model": NAME, "prompt": "é" * 14_000_000}, ensure_ascii=False).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n" % len(body)
    before_mb, count = resident_mb(gateway.process.pid), 10
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(send(gateway, head + body))
        until(lambda: gateway.metric("medusa_gateway_waiting", model=NAME) == count, gateway.output)
        assert resident_mb(gateway.process.pid) - before_mb < 1.3 * count * len(body) / 1e6 + 100  # it was five times


@pytest.mark.parametrize("part", ["1,", "[],", '"",', '{"a":1},'])
def test_a_body_of_many_values_costs_little_more_than_its_parsing(part: str) -> None:
    raw = f'{{"model": "m", "prompt": [{part * (900_000 // (part.count(":") + part.count(",") + 1))}1]}}'.encode()
    began = time.process_time()
    json.loads(raw)
    parsed = time.process_time()
    parse_call("/v1/completions", raw, {})
    assert time.process_time() - parsed < 3 * (parsed - began) + 0.05


def test_a_page_cannot_send_what_its_browser_does_not_ask_for(start_gateway: Start) -> None:
    gateway = start_gateway()
    body, page = {"model": "none", "prompt": "a"}, {"Origin": "https://evil.example"}

    def status(**headers: str) -> int:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return gateway.exchange("POST", "/v1/completions", body, given)[0]

    for kind in ("text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert status(Content_Type=kind, **page) == 415
        assert status(Content_Type=kind) == 404  # curl -d
        assert status(Content_Type=kind, Authorization="Bearer any", **page) == 404
        assert status(Content_Type=kind, Sec_Fetch_Site="same-origin", **page) == 404
        assert status(Content_Type=kind, Sec_Fetch_Site="same-site", **page) == 415
    assert status(**page) == 404
