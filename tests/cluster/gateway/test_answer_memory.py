"""Large answers of many clients, which have a limit of their own in a gateway's memory."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_stand_in import StandIn
from gateway_fixtures import NAME, GatewayProcess, peak_mb, resident_mb
from medusa_cluster.gateway.answer_memory import AnswerMemory, default_total_bytes
from memory_group import MemoryGroup, group
from waiting import until

__all__ = ["group"]

Start = Callable[..., GatewayProcess]
_USAGE = {"prompt_tokens": 1, "completion_tokens": 7}
_ANSWER = json.dumps({"choices": ["x" * (24 << 20)], "usage": _USAGE}).encode()
_REQUEST = json.dumps({"model": NAME, "prompt": "text"}).encode()
_EVENT = b'event: response.completed\ndata: {"type": "response.completed", "text": "' + b"x" * (8 << 20) + b'"}\n\n'

# A process that is an instance, which sends 6 of the 8 MB of an answer and then nothing.
_HALF = """
import http.server, threading

class Half(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(8 << 20))
        self.end_headers()
        self.wfile.write(b"x" * (6 << 20))
        self.wfile.flush()
        threading.Event().wait()

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Half)
print(server.server_port, flush=True)
server.serve_forever()
"""


class _Instance(http.server.ThreadingHTTPServer):
    """An instance of large answers. ``broken``: they end early, once the gateway has begun to pass them on."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Large)
        self.broken = False
        self.events: bytes | None = None
        self.runs = 0


class _Large(http.server.BaseHTTPRequestHandler):
    server: _Instance

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.runs += 1
        answer = _ANSWER if self.server.events is None else self.server.events
        self.send_response(200)
        self.send_header("Content-Type", "application/json" if self.server.events is None else "text/event-stream")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the client, and so the gateway, may have seen enough
            self.wfile.write(answer[: len(answer) // 2] if self.server.broken else answer)
        self.close_connection = self.server.broken

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def instance(cluster: StandIn) -> Iterator[_Instance]:
    cluster.deploy(NAME, **{"max-concurrency": "128"})
    with _Instance() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        cluster.add(NAME, "one", f"http://127.0.0.1:{server.server_port}")
        yield server
        server.shutdown()


def ask(gateway: GatewayProcess) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", gateway.port), timeout=60)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    client.sendall(head % len(_REQUEST) + _REQUEST)
    return client


def read(client: socket.socket) -> bytes:
    found = bytearray()
    while piece := client.recv(1 << 20):
        found += piece
    return bytes(found)


def test_answers_that_are_held_have_a_budget_and_all_come_whole(start_gateway: Start, instance: _Instance) -> None:
    """Those without memory are passed on as fast as their clients take them."""
    gateway = start_gateway("--answer-memory-mb", "100")
    before_mb = resident_mb(gateway.process.pid)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(ask(gateway)) for _ in range(16)]
        until(lambda: instance.runs == len(clients), gateway.output)
        time.sleep(2)  # for the gateway to take what it can
        assert 0 < gateway.metric("medusa_gateway_answer_memory_bytes") <= 100e6
        assert peak_mb(gateway.process.pid) - before_mb < 200  # of 400
        for client in clients:
            head, _, body = read(client).partition(b"\r\n\r\n")
            assert b" 200 OK" in head
            assert body == _ANSWER
    until(lambda: gateway.metric("medusa_gateway_answer_memory_bytes") == 0, gateway.output)
    assert gateway.metric("medusa_gateway_tokens_total", model=NAME) == 7 * len(clients)
    assert instance.runs == len(clients)


@pytest.mark.root
@pytest.mark.parametrize("group", [500], indirect=True)
def test_answers_that_nobody_takes_leave_a_gateway_with_little_memory_alive(
    group: MemoryGroup, start_gateway: Start, instance: _Instance
) -> None:
    gateway = start_gateway(wrapper=group.inside)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(ask(gateway)) for _ in range(24)]  # for 600 MB together
        until(lambda: instance.runs == len(clients), gateway.output)
        time.sleep(2)  # for the gateway to take what it can
        assert gateway.process.poll() is None, "killed for want of memory"
        assert 0 < gateway.metric("medusa_gateway_answer_memory_bytes") <= group.limit_bytes // 4
        for client in clients:
            assert read(client).endswith(_ANSWER)
    assert group.kills() == 0


@pytest.mark.parametrize(
    ("available_mb", "expected_mb"),
    [(16_000, 1024), (4096, 1024), (2000, 500), (400, 100), (64, 16), (20, 16), (0, 16)],
)
def test_the_memory_for_answers_is_by_default_a_part_of_what_is_available(
    tmp_path: Path, available_mb: int, expected_mb: int
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {available_mb * 10**6 // 1024 + 1} kB\n")
    assert default_total_bytes(tmp_path) // 10**6 == expected_mb


def test_an_answer_that_breaks_off_while_it_is_passed_on_breaks_the_clients_connection(
    start_gateway: Start, instance: _Instance
) -> None:
    gateway = start_gateway("--answer-memory-mb", "1")
    instance.broken = True
    with ask(gateway) as client:
        try:
            _, _, body = read(client).partition(b"\r\n\r\n")
        except ConnectionError:
            body = b""
        assert len(body) < len(_ANSWER)
    assert instance.runs == 1
    assert "broke off" in gateway.output()
    instance.broken = False
    assert gateway.post("/v1/completions", json.loads(_REQUEST)) == (200, json.loads(_ANSWER))


def test_an_instance_killed_in_the_middle_of_an_answer_counts_as_lost_not_as_a_client_that_left(
    cluster: StandIn, start_gateway: Start
) -> None:
    cluster.deploy(NAME)
    with subprocess.Popen([sys.executable, "-c", _HALF], stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        cluster.add(NAME, "one", f"http://127.0.0.1:{int(victim.stdout.readline())}")
        gateway = start_gateway("--answer-memory-mb", "1")
        with ask(gateway) as client:
            found = bytearray()
            while len(found) < 4 << 20:
                found += client.recv(1 << 20)
            victim.kill()
            with contextlib.suppress(ConnectionError):
                found += read(client)
        assert len(found) < 8 << 20
        until(lambda: gateway.metric("medusa_gateway_requests_total", status="503") == 1, gateway.output)
        with ask(gateway) as other:
            until(lambda: gateway.metric("medusa_gateway_waiting") == 1, gateway.output)
            other.close()
        until(lambda: gateway.metric("medusa_gateway_requests_total", status="499") == 1, gateway.output)
    assert gateway.metric("medusa_gateway_cancelled_total") == 1
    assert gateway.metric("medusa_gateway_requests_total") == 2


def test_an_event_of_a_stream_for_which_there_is_no_memory_now_ends_it_with_an_error(
    start_gateway: Start, instance: _Instance
) -> None:
    gateway = start_gateway("--answer-memory-mb", "40")
    with ask(gateway) as other:  # which takes nothing of a whole answer yet
        until(lambda: gateway.metric("medusa_gateway_answer_memory_bytes") > 24e6, gateway.output)
        instance.events = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n' + _EVENT
        with ask(gateway) as client:
            events = read(client).partition(b"\r\n\r\n")[2]
        assert events.count(b'"code":"answer_memory"') == 1, events[-500:]
        assert b"--answer-memory-mb" in events
        assert read(other).endswith(_ANSWER)
    with ask(gateway) as client:
        assert b"response.completed" in read(client), "it fits alone"
    until(lambda: gateway.metric("medusa_gateway_answer_memory_bytes") == 0, gateway.output)


def test_an_event_of_a_stream_that_never_fits_is_the_requests_fault(start_gateway: Start, instance: _Instance) -> None:
    """Nobody is told to try again later."""
    instance.events = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n' + _EVENT
    gateway = start_gateway("--answer-memory-mb", "16")
    with ask(gateway) as client:
        events = read(client).partition(b"\r\n\r\n")[2]
    assert events.count(b'"code":"answer_too_large"') == 1, events[-500:]
    assert b"at most 3 MiB as an event of a stream" in events
    assert gateway.metric("medusa_gateway_answer_memory_bytes") == 0
    instance.events = _EVENT[:1000] + _EVENT[-1000:]
    with ask(gateway) as client:
        assert b"response.completed" in read(client)


def test_a_share_that_does_not_fit_stays_as_it_is() -> None:
    memory = AnswerMemory(100)
    with memory.share() as one, memory.share() as other:
        assert one.resize(60)
        assert not other.resize(50)
        assert other.resize(40)
        assert not one.resize(61)
        assert memory.used_bytes == 100
        assert one.resize(10)
        assert other.resize(90)
    assert memory.used_bytes == 0
