"""Origins that attack: each answer ends in one clear error, soon, with little memory, and nothing of it is sent on."""

from __future__ import annotations

import itertools
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.checkpoint.reader import open_checkpoint
from medusa_runtime.errors import ForbiddenError, MedusaError, ObjectChangedError, StorageError
from medusa_runtime.storage.http import wire
from medusa_runtime.storage.http.endpoint import Endpoint, is_link_local, is_loopback
from medusa_runtime.storage.http.store import HttpStore
from medusa_runtime.storage.http.wire import Connection, WireError
from medusa_runtime.storage.retry import RetryPolicy
from medusa_runtime.storage.s3 import S3Store
from scripted_server import Answer, ScriptedServer

QUICK = RetryPolicy(attempts=2, patience_s=3.0, stall_s=1.0, first_pause_s=0.01)
BODY = bytes(range(256)) * 8


def head(*lines: str, status: str = "206 Partial Content") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode("latin-1")


def ranged(first: int = 0, last: int = 3, *lines: str) -> bytes:
    """A right answer, with these lines added."""
    count = last - first + 1
    fields = [f"Content-Range: bytes {first}-{last}/{len(BODY)}", f"Content-Length: {count}", 'ETag: "v"', *lines]
    return head(*fields) + BODY[first : last + 1]


def read(answer: bytes, stop: int = 4) -> bytes:
    with ScriptedServer(lambda request: answer) as server:
        store = HttpStore(server.url, QUICK, {})
        try:
            return store.read("w", 0, stop)[0]
        finally:
            store.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ranged(0, 3, "X: a\nInjected: yes"), "end in CR LF"),
        (ranged(0, 3, "X: a\rInjected: yes"), "end in CR LF"),
        (ranged(0, 3, "X: a\x00b"), "no control characters"),
        (ranged(0, 3, "X: a\x1b[31mb"), "no control characters"),
        (ranged(0, 3, "X : a"), "expected a field"),
        (ranged(0, 3, ": a"), "expected a field"),
        (ranged(0, 3, "no colon"), "expected a field"),
        (head(" folded: first", 'ETag: "v"'), "expected a field"),
        (ranged(0, 3).replace(b"\r\n", b"\n", 7), "line feeds alone"),
        (ranged(0, 3, "Content-Length: 5"), "expected content-length once"),
        (ranged(0, 3, 'ETag: "other"'), "expected etag once"),
        (ranged(0, 3, "Transfer-Encoding: chunked"), "expected Content-Length or Transfer-Encoding"),
        (head("Transfer-Encoding: gzip, chunked"), "expected Content-Length or Transfer-Encoding"),
        (head("Content-Length: ²"), "expected Content-Length to be a number"),
        (head("Content-Length: +4"), "expected Content-Length to be a number"),
        (head("Content-Length: 4, 4"), "expected Content-Length to be a number"),
        (head("Content-Length: " + "9" * 5000), "expected Content-Length to be a number"),
        (head("Content-Length: 4", "Content-Range: bytes 0-3/2"), "expected Content-Range"),
        (head("Content-Length: 4", "Content-Range: bytes 3-0/9"), "expected Content-Range"),
        (head("Content-Length: 4", "Content-Range: bytes 0-3/*"), "expected Content-Range"),
        (head("Content-Length: 4", "Content-Range: bytes ²-3/9"), "expected Content-Range"),
        (head("Content-Length: 4"), "expected Content-Range"),
        (head("Content-Length: 9", "Content-Range: bytes 0-3/9") + BODY, "the server announces 9"),
        (ranged(0, 3, "Content-Encoding: gzip"), "sends it encoded"),
        (head("Content-Length: 4", "Content-Encoding: br", status="200 OK") + BODY, "sends it encoded"),
        (head("Content-Range: bytes */100", "Content-Length: 0", status="416 No"), "no bytes from 0 on"),
        (head("Content-Range: bytes */x", "Content-Length: 0", status="416 No"), "expected Content-Range"),
        (head("Transfer-Encoding: chunked", status="200 OK") + b"zz\r\n", "expected the size of a chunk"),
        (head("Transfer-Encoding: chunked", status="200 OK") + b"-1\r\n", "expected the size of a chunk"),
        (head("Transfer-Encoding: chunked", status="200 OK") + b"\r\n", "expected the size of a chunk"),
        (head("Transfer-Encoding: chunked", status="200 OK") + b"f" * 16 + b"\r\n", "expected the size of a chunk"),
        (head("Transfer-Encoding: chunked", status="200 OK") + b"1;" + b"x" * 300, "less than 256 bytes"),
        (head("Transfer-Encoding: chunked", status="200 OK") + b"1\r\nab\r\n0\r\n\r\n", "a line's end behind a chunk"),
        (head("Transfer-Encoding: chunked", status="200 OK") + b"5\r\nabcde\r\n0\r\n\r\n", "does not say how many"),
        (head("Location: http://[", "Content-Length: 0", status="302 Found"), "redirected to"),
        (head("Location: file:///etc/passwd", "Content-Length: 0", status="302 Found"), "redirected to"),
        (head("Location: http://a b/", "Content-Length: 0", status="302 Found"), "redirected to"),
        (head("Location: http://h:99999/", "Content-Length: 0", status="302 Found"), "redirected to"),
        (head("Location: /w", "Content-Length: 0", status="302 Found"), "more than 5 redirects"),
        (head(status="101 Switching Protocols"), "another protocol"),
        (head(status="100 Continue") * 20, "that announce one"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "expected an HTTP/1.1 answer"),
        (b"HTTP/2.0 206 OK\r\n\r\n", "expected an HTTP/1.1 answer"),
        (b"X" * 100_000, "more than 65536 bytes"),
        (head("Content-Length: 9", status="418 Teapot") + b"\x1b]0;own\x07x", r"found 418 \(\]0;own x\)"),
    ],
)
def test_answers_that_are_not_allowed(answer: bytes, message: str) -> None:
    with pytest.raises(StorageError, match=message):
        read(answer)


@pytest.mark.parametrize(
    "answer",
    [
        ranged(),
        ranged(0, 3, "X-Empty:", "X:a", "Via: 1.1 a", "Via: 1.1 b", "X-Latin: caf\xe9"),
        ranged(0, 3, "X: folded", "\tline"),
        head(status="103 Early Hints") + head(status="100 Continue") + ranged(),
        head("Transfer-Encoding: Chunked", status="200 OK")
        + b"2;x=y\r\n\x00\x01\r\n02\r\n\x02\x03\r\n0\r\nT: x\r\n\r\n",
        head("Content-Encoding: identity", "Content-Length: 4", status="200 OK") + BODY[:4],
        head("Connection: close", status="200 ") + BODY[:4],
        b"HTTP/1.0 200 OK\r\n\r\n" + BODY[:4],
    ],
)
def test_answers_that_are_allowed(answer: bytes) -> None:
    assert read(answer) == BODY[:4]


def test_nothing_of_an_etag_comes_back_but_an_entity_tag() -> None:
    """An ETag with a line feed once injected a header into the request to another host."""
    for etag, sent in (('"v" x', None), ("v", None), ('"v"', b'If-Match: "v"\r\n'), ('W/"v"', None)):
        other = ScriptedServer(lambda request, etag=etag: ranged().replace(b'"v"', etag.encode()))
        answer = head(f"Location: {other.url}/x", "Content-Length: 0", status="302 Found")
        moved = ScriptedServer(lambda request, answer=answer: answer)
        with other, moved:
            store = HttpStore(moved.url, QUICK, {})
            version = store.read("w", 0, 4)[1].version if sent or etag.startswith("W/") else None
            store.read("w", 0, 4, version)
            store.close()
        conditions = [line for line in other.requests[-1].split(b"\r\n") if line.startswith(b"If-")]
        assert conditions == ([sent.strip()] if sent else [])


def test_a_refusal_with_an_endless_body_is_not_read() -> None:
    """One chunk of a gigabyte in a 503, which once took 613 MB."""
    piece = bytes(1 << 20)

    def answer(request: bytes) -> Iterator[bytes]:
        yield head("Transfer-Encoding: chunked", status="503 Busy") + b"40000000\r\n"
        yield from itertools.repeat(piece, 1024)

    with ScriptedServer(answer) as server:
        store = HttpStore(server.url, QUICK, {})
        with pytest.raises(StorageError, match="answers 503"):
            store.read("w", 0, 4)
        store.close()
        assert server.sent_bytes < 16 << 20  # what socket buffers hold, twice


def test_an_archive_from_a_server_without_ranges_is_not_read_whole() -> None:
    """Its directory is at its end; the server would send all in front of it, too."""
    size = 1 << 30

    def answer(request: bytes) -> Iterator[bytes]:
        yield head(f"Content-Length: {size}", 'ETag: "v"', status="200 OK") + b"PK\x03\x04"
        yield from itertools.repeat(bytes(1 << 20), 1024)

    with ScriptedServer(answer) as server:
        with pytest.raises(StorageError, match="ignores Range"):
            open_checkpoint(f"{server.url}/model.bin")
        assert server.sent_bytes < 32 << 20


@pytest.mark.parametrize("where", ["head", "small body", "chunks", "range"])
def test_bytes_that_trickle_do_not_hold_a_fetch(where: str) -> None:
    """A server that sends a byte from time to time is never silent, but too slow."""
    starts = {
        "head": b"HTTP/1.1 206 Partial Content\r\nX: ",
        "small body": head("Content-Length: 1000", status="503 Busy"),
        "chunks": head("Transfer-Encoding: chunked", status="200 OK") + b"ff\r\n",
    }

    def answer(request: bytes) -> Iterator[bytes]:
        if where == "range":  # from where the last connection was given up
            (first,) = re.findall(rb"Range: bytes=(\d+)-1999", request)
            length = f"Content-Length: {2000 - int(first)}"
            yield head(f"Content-Range: bytes {int(first)}-1999/2048", length, 'ETag: "v"')
        else:
            yield starts[where]
        for _ in range(1000):
            time.sleep(0.1)
            yield b"x"

    began = time.monotonic()
    with ScriptedServer(answer) as server:
        store = HttpStore(server.url, QUICK, {})
        with pytest.raises(StorageError, match=r"only .* bytes came|did not come within|answers 503"):
            store.read("w", 0, 2000) if where != "range" else store.read_into("w", 0, memoryview(bytearray(2000)))
        store.close()
        assert time.monotonic() - began < 60


def test_a_byte_an_answer_does_not_hold_a_fetch() -> None:
    """Each answer makes progress, and all together none that is worth waiting for."""

    def answer(request: bytes) -> Answer:
        first = int(request.partition(b"bytes=")[2].partition(b"-")[0])
        time.sleep(0.05)
        return ranged(first, first)

    began = time.monotonic()
    policy = RetryPolicy(patience_s=2.0, stall_s=1.0, least_bytes_per_s=1024.0)
    with ScriptedServer(answer, kept=True) as server:
        store = HttpStore(server.url, policy, {})
        with pytest.raises(StorageError, match="too slow"):
            store.read_into("w", 0, memoryview(bytearray(2000)))
        assert time.monotonic() - began < 60
        store.close()


def test_a_region_that_is_not_one_signs_for_no_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret"}
    for region in ("evil.example/", "x.evil.example", "a@evil.example", "eu-west-1\tx", "-", "a:1"):
        refusal = head(f"x-amz-bucket-region: {region}", "Content-Length: 0", status="403 Forbidden")
        with ScriptedServer(lambda request, refusal=refusal: refusal) as server:
            store = S3Store("s3://bucket/m", QUICK, {**keys, "AWS_ENDPOINT_URL": server.url})
            with pytest.raises(ForbiddenError):
                store.read("w", 0, 4)
            store.close()
            assert len(server.requests) == 1
            assert b"/us-east-1/s3/" in server.requests[0]


def test_a_change_within_the_second_of_the_last_one_is_noticed_by_the_size() -> None:
    """Last-Modified is the same then, and the bytes of both versions were once put together."""
    date, sizes = "Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT", [8, 8, 9, 9]

    def answer(request: bytes) -> bytes:
        first, last = re.findall(rb"Range: bytes=(\d+)-(\d+)", request)[0]
        count = int(last) - int(first) + 1
        place = f"Content-Range: bytes {int(first)}-{int(last)}/{sizes.pop(0)}"
        return head(place, f"Content-Length: {count}", date) + bytes(count)

    with ScriptedServer(answer) as server:
        store = HttpStore(server.url, QUICK, {})
        version = store.stat("w").version
        buffer = memoryview(bytearray(4))
        store.read_into("w", 0, buffer, version)
        with pytest.raises(ObjectChangedError, match=r"expected 8 bytes, found 9 with the same version"):
            store.read_into("w", 4, buffer, version)
        assert store.stat("w").size == 9
        store.close()


def test_an_unasked_answer_is_not_taken_for_the_next() -> None:
    answers = [ranged() + ranged(8, 11), ranged(4, 7)]
    with ScriptedServer(lambda request: answers.pop(0), kept=True) as server:
        store = HttpStore(server.url, QUICK, {})
        assert store.read("w", 0, 4)[0] == BODY[:4]
        assert store.read("w", 4, 8)[0] == BODY[4:8]
        store.close()


def test_urls_that_are_odd_are_one_error(tmp_path: Path) -> None:
    for url in ("http://a b/m", "http://\ud800/m", "http://h/\ud800", "http://-\x00/m", "http://[::1/m", "http://h:x/"):
        with pytest.raises(MedusaError, match="expected"):
            HttpStore(url, QUICK, {})
    stored: Any = HttpStore("http://bücher.example/m", QUICK, {})
    assert stored._home.endpoint.host == "xn--bcher-kva.example"


@pytest.mark.parametrize(
    "host",
    ["2130706433", "0x7f.1", "017700000001", "127.1", "0", "0.0.0.0", "[::ffff:7f00:1]", "[::]", "[0:0::0:1]",
     "2852039166", "0xa9.0xfe.0xa9fe", "[::ffff:a9fe:a9fe]", "[FE80::1%25eth0]"],
)  # fmt: skip
def test_no_spelling_of_this_machine_is_asked_of_a_proxy(host: str) -> None:
    redirect = head(f"Location: http://{host}/credentials", "Content-Length: 0", status="302 Found")
    with ScriptedServer(lambda _: redirect) as proxy:
        store = HttpStore("http://models.example/m", QUICK, {"http_proxy": proxy.url})
        with pytest.raises(ForbiddenError, match="only this machine can reach"):
            store.read("w", 0, 4)
        store.close()
    assert [request.split(b" ")[1] for request in proxy.requests] == [b"http://models.example/m/w"]


def test_names_that_look_like_addresses_are_names() -> None:
    for host in ("0x7g.1", "127.example", "1.2.3.4.5", "fe80.example", "::1.example"):
        assert not is_loopback(host), host
        assert not is_link_local(host), host


def test_a_name_with_many_silent_addresses_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:  # the kernel drops what comes after these
            one.setblocking(False)
            one.connect_ex(address)
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address)] * 1000
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        began = time.monotonic()
        with pytest.raises(WireError, match="nothing came for too long"):
            Connection(Endpoint(False, "many.example", address[1]), 0.2)
        assert time.monotonic() - began < 10
        with socket.create_server(("127.0.0.1", 0)) as good:
            found[2:] = [(*found[0][:4], good.getsockname())]
            with wire._reach("many.example", address[1], 0.2) as connection:
                assert connection.gettimeout() == 0.2  # though less of the time for all addresses was left
        for one in waiting:
            one.close()
