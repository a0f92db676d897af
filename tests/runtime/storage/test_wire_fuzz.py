"""Answers of any bytes over real connections: the bytes that were asked for or one StorageError, and no leak."""

from __future__ import annotations

import random

from fuzzing import fuzz
from hypothesis import strategies as st
from medusa_runtime.errors import StorageError
from medusa_runtime.storage.http.fields import FieldError, content_range, parse_head, retry_after_s
from medusa_runtime.storage.http.store import HttpStore
from medusa_runtime.storage.retry import RetryPolicy
from scripted_server import ScriptedServer

BODY = bytes(range(64))
ONCE = RetryPolicy(attempts=1, patience_s=5.0, stall_s=2.0, first_pause_s=0.0)
STATUS = [
    "HTTP/1.1 206 OK",
    "HTTP/1.1 200 OK",
    "HTTP/1.0 200 OK",
    "HTTP/1.1 416 No",
    "HTTP/1.1 503 Busy",
    "HTTP/1.1 100 Go",
]
NAMES = [
    "Content-Length",
    "Content-Range",
    "ETag",
    "Transfer-Encoding",
    "Location",
    "Retry-After",
    "Content-Encoding",
    "X",
    " ",
]
VALUES = [
    "64",
    "0",
    "5",
    "bytes 0-63/64",
    "bytes */64",
    '"v"',
    "chunked",
    "http://[",
    "/w",
    "²",
    "-1",
    "9" * 40,
    "gzip",
    "",
]
LINES = st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)).map(": ".join)
ENDS = st.sampled_from(["\r\n", "\r\n", "\r\n", "\n", "\r", "\x00"])
BODIES = st.one_of(
    st.just(BODY), st.just(b"40\r\n" + BODY + b"\r\n0\r\n\r\n"), st.binary(max_size=40), st.just(b"fffffff\r\n" + BODY)
)
RIGHT = b'HTTP/1.1 206 OK\r\nContent-Range: bytes 0-63/64\r\nContent-Length: 64\r\nETag: "v"\r\n\r\n' + BODY
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n"
    + BODY[:32]
    + b"\r\n20\r\n"
    + BODY[32:]
    + b"\r\n0\r\n\r\n"
)


def _answer(status: str, lines: list[str], end: str, body: bytes) -> bytes:
    return end.join([status, *lines, "", ""]).encode("latin-1") + body


ANSWERS = st.one_of(
    st.builds(_answer, st.sampled_from(STATUS), st.lists(LINES, max_size=6), ENDS, BODIES), st.binary(max_size=60)
)


def test_answers() -> None:
    current = b""

    def check(data: bytes) -> None:
        nonlocal current
        current = data
        server.requests.clear()
        store = HttpStore(server.url, ONCE, {"ALL_PROXY": server.url})  # redirects lead nowhere else
        try:
            found, info = store.read("w", 0, 64)
            assert len(found) <= 64
            assert info.size >= 0
        except StorageError as error:
            _short(error)
        buffer = bytearray(64)
        try:
            store.read_into("w", 0, memoryview(buffer))
        except StorageError as error:
            _short(error)
        finally:
            store.close()

    with ScriptedServer(lambda request: current) as server:
        fuzz(ANSWERS, check, [RIGHT, CHUNKED])


def _short(error: StorageError) -> None:
    assert len(str(error)) < 2000


def test_heads() -> None:
    """The parser alone, which is much faster than connections: a head's fields hold nothing that RFC 9110 forbids."""

    def check(data: bytes) -> None:
        try:
            head = parse_head(data)
        except FieldError:
            return
        assert 100 <= head.status < 600
        for name, value in head.fields.items():
            assert name == name.lower().strip()
            assert value == value.strip(" \t")
            assert not any((ord(each) < 32 and each != "\t") or each == "\x7f" for each in name + value)
            retry_after_s(value, value, 0.0)
            try:
                first, stop, size = content_range(value)
            except FieldError:
                continue
            assert 0 <= first < stop <= size

    head = RIGHT.partition(b"\r\n\r\n")[0]
    fuzz(
        ANSWERS.map(lambda answer: answer.partition(b"\r\n\r\n")[0]),
        check,
        [head, head + b"\r\nRetry-After: Sun, 06 Nov 1994 08:49:37 GMT"],
    )


def test_regressions() -> None:
    """Dates that are none, which the calendar would raise for."""
    chance = random.Random(0)
    for day, hour in ((0, 0), (31, 99), (99, 0), *((chance.randrange(100), chance.randrange(100)) for _ in range(100))):
        retry_after_s(f"Sun, {day:02} Feb 0000 {hour:02}:99:99 GMT", "", 0.0)
