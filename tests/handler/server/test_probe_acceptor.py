"""Who accepts connections: probes are answered at once, all else reaches the worker whole."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from medusa_handler.platform import Platform
from medusa_handler.probes import Probes
from medusa_handler.server.probe_acceptor import ProbeAcceptor
from medusa_runtime.config import Settings
from medusa_runtime.liveness import Heartbeats, is_stopped

Serve = Callable[..., Any]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def connect(served: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=240)


def stopped_worker(served: Any) -> int:
    """Its process id; it is up and does nothing."""
    served.wait_ready()
    (worker,) = children(served.process.pid)
    os.kill(worker, signal.SIGSTOP)
    return worker


def read_all(connection: socket.socket) -> bytes:
    found = b""
    while piece := connection.recv(65536):
        found += piece
    return found


def test_a_worker_that_does_nothing_keeps_no_probe_waiting(serve: Serve) -> None:
    served = serve()
    worker = stopped_worker(served)
    with connect(served) as other:
        other.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert served.request("GET", "/livez")[1] == {"status": "alive"}
        assert served.request("GET", "/readyz")[0] == 200
        os.kill(worker, signal.SIGCONT)
        assert read_all(other).startswith(b"HTTP/1.1 200")


def test_one_connection_may_probe_and_ask(serve: Serve) -> None:
    served = serve()
    with contextlib.closing(served.connect()) as connection:
        for method, path, status in (
            *(("GET", "/livez", 200), ("HEAD", "/livez", 200), ("GET", "/v1/models", 200)),
            *(("GET", "/livez?a=b", 200), ("POST", "/livez", 405), ("GET", "/v1/models", 200)),
        ):
            connection.request(method, path)
            response = connection.getresponse()
            assert (response.status, bool(response.read())) == (status, method != "HEAD"), path


def test_what_comes_in_pieces_or_with_more_behind_it_is_the_workers(serve: Serve) -> None:
    served = serve()
    probe = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
    last = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    with connect(served) as connection:
        connection.sendall(probe + last)
        assert read_all(connection).count(b"HTTP/1.1 200 OK") == 2
    with connect(served) as connection:
        for byte in probe.replace(b"Host", b"Connection: close\r\nHost"):
            connection.sendall(bytes((byte,)))
        assert b'{"status": "alive"}' in read_all(connection)
    with connect(served) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        assert b'{"status": "alive"}' in read_all(connection)
    with connect(served) as silent:
        assert served.request("GET", "/livez")[0] == 200
        silent.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        assert read_all(silent).endswith(b'{"status": "alive"}\n')


def test_a_worker_that_dies_leaves_connections_to_the_next_one(serve: Serve) -> None:
    served = serve()
    worker = stopped_worker(served)
    with connect(served) as waiting:
        waiting.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert served.request("GET", "/livez")[0] == 200  # so the one before it has been passed on
        os.kill(worker, signal.SIGKILL)
        assert read_all(waiting).startswith(b"HTTP/1.1 200")
    assert children(served.process.pid) != [worker]


def test_more_connections_than_there_is_room_for_are_lost_nowhere(serve: Serve) -> None:
    served = serve()
    worker = stopped_worker(served)
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(connect(served)) for _ in range(500)]
        for connection in waiting:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert served.request("GET", "/livez")[0] == 200  # /readyz says after a second that the worker is stopped
        os.kill(worker, signal.SIGCONT)
        for connection in waiting:
            assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_a_worker_that_is_stopped_during_a_start_loses_no_client(serve: Serve) -> None:
    """It is continued, because a new worker would not have the connections of the one that was killed."""
    served = serve(ready=False)
    served.until(lambda: served.request("GET", "/metrics")[0] == 200)
    (worker,) = children(served.process.pid)
    body = b'{"prompt": "a", "max_tokens": 2}'
    with connect(served) as waiting:
        waiting.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        served.until(lambda: served.metric("medusa_requests_in_flight") == 1)
        os.kill(worker, signal.SIGSTOP)
        served.until(lambda: is_stopped(worker))
        served.until(lambda: not is_stopped(worker))
        assert children(served.process.pid) == [worker]
        served.control(ready=True)
        assert read_all(waiting).startswith(b"HTTP/1.1 200")
    os.kill(worker, signal.SIGSTOP)  # who stops it again means it
    served.until(lambda: children(served.process.pid) not in ([], [worker]))


def test_a_new_connection_does_not_wait_for_thousands_that_end() -> None:
    order: list[str] = []

    class Recorded(ProbeAcceptor):
        def _refuse(self, *arguments: Any, **more: Any) -> None:
            order.append("ended")
            super()._refuse(*arguments, **more)

        def _send(self, *arguments: Any) -> None:
            order.append("probe")
            super()._send(*arguments)

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.setblocking(False)
        acceptor = Recorded(
            listener, Probes(Settings(), Platform(), None, Heartbeats()), read_timeout_s=5.0, tick=lambda: None
        )
        stack.callback(acceptor.handoff.close)
        stack.callback(acceptor.handoff.close_writing_end)
        stack.callback(acceptor._selector.close)
        pairs = [socket.socketpair() for _ in range(400)]
        for ours, theirs in pairs:
            stack.enter_context(ours)
            theirs.setblocking(False)
            ours.sendall(b"POST / HTTP/1.1\r\nHost: a\r\n")
            acceptor._dispatch(theirs)
            ours.shutdown(socket.SHUT_WR)
        probe = stack.enter_context(socket.create_connection(listener.getsockname()))
        probe.sendall(b"GET /livez HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        acceptor._handle([*(theirs for _, theirs in pairs), None])
        assert probe.recv(64).startswith(b"HTTP/1.1 200")
        assert pairs[-1][0].recv(64).startswith(b"HTTP/1.1 400")
    assert len(order) == 401
    assert order.index("probe") < 300
