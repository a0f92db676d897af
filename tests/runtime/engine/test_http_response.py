"""An answer of an engine's HTTP server, over a real connection, and in parts of any size."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from medusa_runtime.engine.http_response import FieldError, HttpResponse

_OK = b"HTTP/1.1 200 OK\r\n"
_CHUNKED = _OK + b"Transfer-Encoding: chunked\r\n\r\n"


def _read(sent: bytes, method: str = "POST", part: int = 1 << 20) -> tuple[HttpResponse, bytes]:
    ours, theirs = socket.socketpair()

    def send() -> None:
        with theirs:
            for at in range(0, len(sent), part):
                theirs.sendall(sent[at : at + part])

    sending = threading.Thread(target=send)
    sending.start()
    with ours:
        answer = HttpResponse(ours, method)
        answer.begin()
        body = b"".join(answer.pieces())
        sending.join()  # a chunked answer is read before its last line has come
    return answer, body


@pytest.mark.parametrize("part", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("sent", "body"),
    [
        (_OK + b"Content-Length: 5\r\n\r\nhello", b"hello"),
        (_OK + b"\r\nto the end", b"to the end"),
        (_CHUNKED + b"3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\n", b"hello"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + _OK + b"Content-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 204 No Content\r\n\r\nnothing", b""),
    ],
)
def test_bodies_of_every_form(sent: bytes, body: bytes, part: int) -> None:
    answer, found = _read(sent, part=part)
    assert found == body
    assert answer.status in (200, 204)


def test_the_answer_to_head_has_no_body() -> None:
    answer, body = _read(_OK + b"Content-Length: 5\r\n\r\n", "HEAD")
    assert body == b""
    assert answer.headers == [("content-length", "5")]


def test_headers_come_as_often_as_they_were_sent() -> None:
    answer, _ = _read(_OK + b"Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nContent-Length: 0\r\n\r\n")
    assert answer.headers == [("set-cookie", "a=1"), ("set-cookie", "b=2"), ("content-length", "0")]


def test_a_stream_is_handed_on_as_it_comes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(_CHUNKED + b"6\r\nfirst \r\n")
        answer = HttpResponse(ours, "POST")
        answer.begin()
        pieces = answer.pieces()
        assert next(pieces) == b"first "  # the server sends no more before this is read
        theirs.sendall(b"4\r\nlast\r\n0\r\n\r\n")
        assert b"".join(pieces) == b"last"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"HTTP/1.1 200",
        _OK + b"Content-Length: 5\r\n\r\nhel",
        _OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
        _OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello",
        _OK + b"Content-Length: -5\r\n\r\nhello",
        _CHUNKED + b"3\r\nhe",
        _CHUNKED + b"3\r\nhello\r\n0\r\n\r\n",
        _CHUNKED + b"three\r\nhel\r\n0\r\n\r\n",
        _CHUNKED + b"3;" + b"x" * 1000 + b"\r\nhel\r\n0\r\n\r\n",
        _OK + b"X: " + b"x" * (1 << 20) + b"\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 9,
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    ],
)
def test_what_is_no_whole_answer_is_refused(sent: bytes) -> None:
    ours, theirs = socket.socketpair()

    def send() -> None:
        with theirs:
            try:
                theirs.sendall(sent)
            except OSError:
                pass  # the reader has gone, after it had seen enough

    sending = threading.Thread(target=send)
    sending.start()
    with ours:
        answer = HttpResponse(ours, "POST")
        with pytest.raises(FieldError):
            _all(answer)
    sending.join(10)
    assert not sending.is_alive()


def test_a_line_without_end_is_given_up_early() -> None:
    """A hostile engine's line is not collected for ever."""
    ours, theirs = socket.socketpair()
    sent = 0

    def send() -> None:
        nonlocal sent
        with theirs:
            try:
                theirs.sendall(_CHUNKED)
                while True:
                    sent += theirs.send(b"1" * 4096)
            except OSError:
                pass

    sending = threading.Thread(target=send)
    sending.start()
    began = time.monotonic()
    with ours, pytest.raises(FieldError, match="at most 256 bytes"):
        _all(HttpResponse(ours, "POST"))
    sending.join(10)
    assert time.monotonic() - began < 10
    assert sent < 16 << 20


def _all(answer: HttpResponse) -> bytes:
    answer.begin()
    return b"".join(answer.pieces())
