"""Clients that send slowly, or never to the end: they hold no thread and little memory, and nobody waits for them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from medusa_handler.http.environ import SMALL_BODY_BYTES
from medusa_handler.server.incoming_request import IncomingRequest, RequestState

Serve = Callable[..., Any]
MANY = 400  # more than the worker has threads
PROMPT_S = 5.0  # on a machine that is busy; a slow client is given thirty seconds
BEGUN = bytes(SMALL_BODY_BYTES)  # so much of a body that the worker is given it
POST = b"POST /anything HTTP/1.1\r\nHost: a\r\n"


def connect(served: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=240)


def read_answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and JSON of an answer that ends with the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            found += piece
    head, _, body = found.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def status_of_kept(connection: socket.socket) -> int:
    """Read one whole answer of a connection that goes on, and return its status."""
    with http.client.HTTPResponse(connection) as response:
        response.begin()
        response.read()
        return response.status


@contextlib.contextmanager
def clients(served: Any, first: bytes, count: int = MANY) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(connect(served)) for _ in range(count)]
        for each in found:
            each.sendall(first)
        time.sleep(1.5)
        yield found


@pytest.fixture
def served(serve: Serve) -> Any:
    served = serve(handler="function/handler.py:anything", read_timeout_s=30.0)
    served.wait_ready()
    return served


def ask(served: Any, body: bytes = b"ten bytes.") -> float:
    """Seconds that a real client waits."""
    began = time.monotonic()
    status, answer, _ = served.request("POST", "/", body)
    assert (status, answer["bytes"]) == (200, len(body))
    return time.monotonic() - began


@pytest.mark.parametrize(
    "first",
    [
        b"POST / HTTP/1.1\r\nHost: a\r\nX-Never-Ends: ",
        POST + b"Content-Length: 1000\r\n\r\nsome",
        POST + b"Content-Length: 20000000\r\n\r\nsome",
        POST + b"Transfer-Encoding: chunked\r\n\r\nfffff\r\nsome",
        POST + b"Content-Length: 20000000\r\n\r\n" + BEGUN,
        POST + b"Expect: 100-continue\r\nContent-Length: 1000\r\n\r\n",
    ],
    ids=["head", "small body", "large body", "chunks", "begun", "continue"],
)
def test_slow_clients_keep_no_other_waiting(served: Any, first: bytes) -> None:
    with clients(served, first):
        assert max(ask(served) for _ in range(20)) < PROMPT_S
        assert served.request("GET", "/readyz")[0] == 200


def test_what_nobody_reads_is_waited_for_by_no_thread(serve: Serve) -> None:
    served = serve()  # without a function most paths are 404
    served.wait_ready()
    with clients(served, POST + b"Content-Length: 20000000\r\n\r\nsome"):
        began = time.monotonic()
        assert served.complete()[0] == 200
        assert time.monotonic() - began < PROMPT_S


def test_further_requests_of_a_connection_come_whole_too(served: Any) -> None:
    whole = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    with clients(served, whole) as found:
        for each in found:
            assert status_of_kept(each) == 200
            each.sendall(whole[:-1])
        time.sleep(1.0)
        assert max(ask(served) for _ in range(20)) < PROMPT_S
        for each in found:
            each.sendall(b"\n")
            assert status_of_kept(each) == 200
    with clients(served, whole + whole[:-1]) as found:  # the second one's part comes with the first one
        assert max(ask(served) for _ in range(20)) < PROMPT_S
        for each in found:
            each.sendall(b"\n")
            answers = b""
            while answers.count(b"HTTP/1.1 200") < 2:
                answers += each.recv(65536)


def test_a_request_in_pieces_is_whole_in_the_end(served: Any) -> None:
    with connect(served) as connection:
        for byte in POST + b"Connection: close\r\nContent-Length: 12\r\n\r\nhello, world":
            connection.sendall(bytes((byte,)))
            time.sleep(0.002)
        assert read_answer(connection) == (200, {"method": "POST", "bytes": 12})
    body = bytes(3_000_000)
    with connect(served) as connection:
        connection.sendall(POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
        for at in range(0, len(body), 100_000):
            connection.sendall(b"186a0\r\n" + body[at : at + 100_000] + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert read_answer(connection) == (200, {"method": "POST", "bytes": 3_000_000})


def test_the_acceptor_refuses_what_is_no_request(serve: Serve) -> None:
    served = serve(handler="function/handler.py:anything", read_timeout_s=1.0)
    served.wait_ready()
    for sent, status, code in (
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "bad_http"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000, 431, "bad_http"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n", 408, "bad_http"),
        (POST + b"Content-Length: 100\r\n\r\nten bytes.", 408, "bad_http"),
    ):
        with connect(served) as connection:
            connection.sendall(sent)
            found, answer = read_answer(connection)
            assert (found, answer["error"]["code"]) == (status, code), sent[:40]
    begun = (POST, POST + b"Content-Length: 100\r\n\r\nten bytes.", POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab")
    for sent in begun:  # a client that ends early is not waited for
        with connect(served) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            found, answer = read_answer(connection)
            assert (found, answer["error"]["message"]) == (400, "the connection ended before the request"), sent


def test_requests_that_their_clients_give_up_cost_the_worker_nothing(serve: Serve) -> None:
    """It took a millisecond for each, for which a good request waited behind thousands of them."""
    served = serve(handler="function/handler.py:anything")
    served.wait_ready()
    ask(served)
    with clients(served, POST + b"Content-Length: 1000000\r\n\r\n{"), clients(served, POST):
        pass
    ask(served)
    assert served.metric("medusa_requests_total") == 2


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def worker_of(served: Any) -> int:
    pid = served.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def test_unfinished_bodies_stay_within_their_budget(serve: Serve) -> None:
    budget_mb = 100
    served = serve(handler="function/handler.py:anything", body_memory_mb=budget_mb, max_body_mb=20)
    served.wait_ready()
    ask(served)
    worker = worker_of(served)
    before = resident_mb(worker)
    piece = bytes(1 << 20)
    with contextlib.ExitStack() as stack:
        senders = [stack.enter_context(connect(served)) for _ in range(64)]
        for sender in senders:
            sender.sendall(POST + b"Content-Length: 20000000\r\n\r\n")
            sender.setblocking(False)
        left = dict.fromkeys(senders, 19_999_999)
        most, end = 0.0, time.monotonic() + 5
        while time.monotonic() < end:
            for sender in senders:
                with contextlib.suppress(OSError):
                    left[sender] -= sender.send(piece[: left[sender]]) if left[sender] else 0
            most = max(most, resident_mb(worker) - before)
            time.sleep(0.01)
        assert 40 < most <= budget_mb
        assert ask(served) < PROMPT_S
    served.until(lambda: resident_mb(worker) - before < budget_mb / 2)
    served.until(lambda: takes(served, bytes(15_000_000)))


def takes(served: Any, body: bytes) -> bool:
    """Return whether the body is taken; a refusal may come before it was sent."""
    with contextlib.suppress(ConnectionError):
        return bool(served.request("POST", "/", body)[0] == 200)
    return False


def test_what_is_parsed_from_a_body_counts_as_its_memory(serve: Serve) -> None:
    served = serve(handler="function/handler.py:anything", body_memory_mb=24, max_body_mb=20)
    served.wait_ready()
    text = json.dumps({"text": "[], " * 500_000}).encode()
    for body, status in ((b"[" + b"[]," * 300_000 + b"[]]", 413), (text, 200), (b"not " + b"[]," * 300_000, 200)):
        found, answer, _ = served.request("POST", "/", body)
        assert found == status, answer
    worker = worker_of(served)
    before = resident_mb(worker)
    status, answer, _ = served.request("POST", "/", b"\n[" + b"[]," * 6_000_000 + b"[]]")
    assert (status, resident_mb(worker) - before < 150) == (413, True)
    assert "--body-memory-mb" in str(answer)


def test_bodies_that_wait_get_their_turn_or_a_clear_refusal(serve: Serve) -> None:
    served = serve(handler="function/handler.py:anything", body_memory_mb=24, max_body_mb=20)
    served.wait_ready()
    took: list[float] = []
    asking = [threading.Thread(target=lambda: took.append(ask(served, bytes(15_000_000)))) for _ in range(6)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(took) == 6
    with connect(served) as slow, contextlib.ExitStack() as stack:
        slow.sendall(POST + b"Content-Length: 20000000\r\n\r\n" + BEGUN)
        time.sleep(0.2)
        assert ask(served, bytes(15_000_000)) < 20.0  # the slow one lost its place
        status, answer = read_answer(slow)
        assert (status, answer["error"]) == (400, answer["error"])
        assert "too slowly" in answer["error"]
        others = [stack.enter_context(connect(served)) for _ in range(MANY)]
        for other in others:
            other.sendall(POST + b"Connection: close\r\nContent-Length: 20000000\r\n\r\n" + BEGUN)
        status, answer = read_answer(others[-1])
        assert status == 503
        assert "the memory for request bodies" in str(answer["error"])


def test_single_bytes_wake_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        served = listener.accept()[0]
        with served:
            incoming = IncomingRequest(served)
            client.sendall(POST + b"Content-Length: 20000000\r\n\r\n")
            select.select([served], [], [], 5)
            assert incoming.peek() is RequestState.PART
            client.sendall(BEGUN[1:])
            assert select.select([served], [], [], 0.1)[0] == []
            client.sendall(b"x")
            assert select.select([served], [], [], 5)[0] == [served]
            assert incoming.peek() is RequestState.HEAD


def test_what_waits_in_the_kernel_is_not_kept_twice() -> None:
    """Thousands of connections may wait, and held up to 48 KB each."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        served = listener.accept()[0]
        with served:
            incoming = IncomingRequest(served)
            client.sendall(POST + b"Content-Length: 16000\r\nX-Long: " + bytes(30_000) + b"\r\n\r\n" + BEGUN[400:])
            while incoming.peek() is not RequestState.WHOLE:
                assert incoming.data == b""
                client.sendall(b"x")
            assert len(incoming.data) > 46_000


def test_a_request_that_begins_on_an_old_connection_has_its_own_time(serve: Serve) -> None:
    served = serve(handler="function/handler.py:anything", keepalive_s=1.0)
    with connect(served) as connection:
        whole = POST + b"Content-Length: 4\r\n\r\nsome"
        connection.sendall(whole)
        assert status_of_kept(connection) == 200
        connection.sendall(whole[:-2])
        time.sleep(3)  # beyond the time for which a connection may be idle
        connection.sendall(whole[-2:])
        assert status_of_kept(connection) == 200
        # Once it is idle again it is closed.
        assert connection.recv(1) == b""


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_takes_a_little_of_its_answer_now_and_then_is_ended(serve: Serve, streams: bool) -> None:
    """It once held its place for as long as it liked: as many as there are places kept everybody else out."""
    served = serve(handler=f"sleeping/handler.py:{'flood' if streams else 'large'}", write_timeout_s=2.0)
    served.wait_ready()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)  # as on a network; else megabytes are buffered
        client.settimeout(30)
        client.connect(("127.0.0.1", served.port))
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert client.recv(15) == b"HTTP/1.1 200 OK"
        deadline = time.monotonic() + 30
        while served.metric("medusa_requests_in_flight"):
            assert time.monotonic() < deadline
            with contextlib.suppress(ConnectionResetError):
                client.recv(1 << 14)
            time.sleep(0.4)
    assert "Traceback" not in served.output()
