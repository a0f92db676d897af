"""Whatever bytes a connection begins with, the acceptor waits, answers, refuses, or passes it on untouched."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from fuzzing import fuzz
from hypothesis import strategies as st
from medusa_handler.http.environ import SMALL_BODY_BYTES
from medusa_handler.platform import Platform
from medusa_handler.probes import Probes
from medusa_handler.server.incoming_request import HEAD_BYTES, RequestState, request_progress
from medusa_handler.server.probe_acceptor import ProbeAcceptor
from medusa_runtime.config import Settings
from medusa_runtime.liveness import Heartbeats

PROBE = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
SEEDS = [
    PROBE,
    b"HEAD /readyz?x=1 HTTP/1.0\r\nAccept: */*\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbody",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\nab\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n",
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\xff\xff\r\n",
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\r\n",
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2;\r\r\n\r\n",
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n\r\n",
    PROBE + PROBE,
]
PIECES = st.sampled_from(
    [
        *(b"GET ", b"HEAD ", b"POST ", b"/livez", b"/readyz", b"/", b"?a=b", b" HTTP/1.1", b" HTTP/1.0", b"\r\n"),
        *(b"\r\n\r\n", b"\n", b"Host: a", b"Content-Length: ", b"content-length:", b"0", b"4", b"16384", b"99999999"),
        *(b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"Connection: close", b"X: y", b" ", b"\t", b"\x00"),
        *(b"body", b"\xff", b":", b"Upgrade: h2c"),
    ]
)
REQUESTS = st.lists(PIECES, max_size=14).map(b"".join)


@pytest.fixture
def acceptor() -> Iterator[ProbeAcceptor]:
    listener = socket.create_server(("127.0.0.1", 0))
    probes = Probes(Settings(), Platform(), None, Heartbeats())
    made = ProbeAcceptor(listener, probes, read_timeout_s=5.0, tick=lambda: None)
    yield made
    made._selector.close()
    made.handoff.close_writing_end()
    made.handoff.close()
    listener.close()


@pytest.mark.timeout(3000)
def test_no_bytes_break_the_acceptor(acceptor: ProbeAcceptor) -> None:
    client, served = _pair(acceptor)
    port = served.getsockname()[1]

    def check(data: bytes) -> None:
        nonlocal client, served
        data = data[: 1 << 15]
        if data:
            client.sendall(data)
        while data and len(served.recv(1 << 16, socket.MSG_PEEK)) < len(data):
            pass
        acceptor._dispatch(served)
        expected = request_progress(data).state if data else RequestState.NOTHING
        if served in acceptor._pending:
            kept = _is_probe(data)
            assert kept or expected in (RequestState.PART, RequestState.NOTHING)
            acceptor._forget(served)
        elif acceptor._waiting:
            assert expected in (RequestState.WHOLE, RequestState.HEAD)
            assert acceptor._waiting.pop() is served
            assert served.recv(1 << 16) == data  # the worker finds all of it
        answered = b""
        client.setblocking(False)
        try:
            answered = client.recv(1 << 16)
        except BlockingIOError:
            pass
        client.setblocking(True)
        if answered:
            assert answered.startswith(b"HTTP/1.1 ")
            assert _is_probe(data) or expected in (RequestState.TOO_LARGE, RequestState.NO_HTTP)
        client.close()
        served.close()
        client, served = _pair(acceptor)
        assert served.getsockname()[1] == port

    try:
        fuzz(st.one_of(REQUESTS, st.binary(max_size=64)), check, SEEDS)
    finally:
        client.close()
        served.close()


def _pair(acceptor: ProbeAcceptor) -> tuple[socket.socket, socket.socket]:
    client = socket.socket()
    # An end of stream that leaves nothing behind: a hundred thousand connections would take all ports for a minute.
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    client.connect(acceptor._listener.getsockname())
    served = acceptor._listener.accept()[0]
    served.setblocking(False)
    return client, served


def _is_probe(data: bytes) -> bool:
    """Read in another way: a GET or HEAD of a probe's path, without a body, and nothing behind it."""
    head, end, behind = data.partition(b"\r\n\r\n")
    line, *fields = head.split(b"\r\n")
    words = line.split(b" ")
    if not end or behind or len(words) != 3 or words[0] not in (b"GET", b"HEAD"):
        return False
    names = [field.partition(b":")[0].strip().lower() for field in fields]
    if any(name in (b"content-length", b"transfer-encoding", b"expect", b"upgrade") for name in names):
        return False
    return words[1].partition(b"?")[0] in (b"/livez", b"/readyz", b"/startupz", b"/health")


@pytest.mark.timeout(3000)
def test_judging_agrees_with_itself_however_the_bytes_come() -> None:
    """A request is whole when its last byte has come, and not before: no prefix of one that waits is whole."""

    def check(data: bytes) -> None:
        whole = request_progress(data).state
        if whole is RequestState.PART:
            for at in range(1, len(data)):
                assert request_progress(data[:at]).state in (RequestState.PART, RequestState.NO_HTTP), data[:at]
        for at in range(1, len(data)):  # nothing is missed by waiting for the least that is missing
            sent, least = request_progress(data[:at])
            assert (least > 0) is (sent is RequestState.PART)
            for later in range(at + 1, min(at + least, len(data) + 1)):
                assert request_progress(data[:later]).state in (RequestState.PART, RequestState.NO_HTTP), (
                    data[:at],
                    least,
                )
        found = re.search(rb"\r\n\r\n", data)
        if found and whole is RequestState.WHOLE:
            assert request_progress(data[: found.start() + 3]).state is not RequestState.WHOLE

    fuzz(REQUESTS, check, SEEDS)


def test_the_bounds_of_what_is_waited_for() -> None:
    def post(*fields: bytes, body: bytes = b"") -> bytes:
        return b"\r\n".join((b"POST / HTTP/1.1", b"Host: a", *fields, b"", b"")) + body

    cases: list[tuple[bytes, Any]] = [
        (b"", RequestState.PART),
        (b"GET", RequestState.PART),
        (b"\r\nGET / HTTP/1.1", RequestState.PART),
        (b"GET / HTTP/1.1\r\n" + b"a" * HEAD_BYTES, RequestState.TOO_LARGE),
        (b"\x16\x03\x01", RequestState.NO_HTTP),
        (post(), RequestState.WHOLE),
        (post(b"Content-Length: 3", body=b"ab"), RequestState.PART),
        (post(b"Content-Length: 3", body=b"abc"), RequestState.WHOLE),
        (post(b"content-length:003", body=b"ab"), RequestState.PART),
        (post(f"Content-Length: {SMALL_BODY_BYTES}".encode()), RequestState.PART),
        (post(f"Content-Length: {SMALL_BODY_BYTES + 1}".encode()), RequestState.PART),
        (post(f"Content-Length: {SMALL_BODY_BYTES + 1}".encode(), body=bytes(SMALL_BODY_BYTES)), RequestState.HEAD),
        (post(b"Content-Length: 3", b"Content-Length: 3"), RequestState.HEAD),
        (post(b"Content-Length: three"), RequestState.HEAD),
        (post(b"Transfer-Encoding: chunked"), RequestState.PART),
        (post(b"Transfer-Encoding: chunked", body=b"3;a=b\r\nabc\r\n0\r\n\r"), RequestState.PART),
        (post(b"Transfer-Encoding: chunked", body=b"3;a=b\r\nabc\r\n0\r\n\r\n"), RequestState.HEAD),
        (post(b"Transfer-Encoding: chunked", body=b"3\r\nabc\r\n0\r\nA: b\r\n\r\nGET /"), RequestState.HEAD),
        (post(b"Transfer-Encoding: chunked", body=b"three\r\n"), RequestState.HEAD),
        (post(b"Transfer-Encoding: chunked", body=b"fffff\r\n" + bytes(SMALL_BODY_BYTES)), RequestState.HEAD),
        (post(b"Transfer-Encoding: gzip"), RequestState.HEAD),
        (post(b"Expect: 100-continue", b"Content-Length: 3"), RequestState.HEAD),
    ]
    for data, expected in cases:
        assert request_progress(data).state is expected, data[:80]
    for length, expected in ((100, RequestState.PART), (101, RequestState.HEAD)):
        assert request_progress(post(f"Content-Length: {length}".encode()), 100).state is expected
