"""Real clients beside a thousand that send their requests a byte a second, and the memory of unfinished bodies.

    python -m benchmarks.server.slow_clients --json out/slow_clients.json

Serves a small JSON function. Sixteen clients ask it, with and without the slow ones in turn. The slow ones are of four
kinds, in equal parts: they never finish a head, a small body, a large body, or a chunked one. Each sends at a moment of
its own in every second; one that is refused or ended comes again a second later. The server's CPU seconds in a second
say what the slow ones cost it, also where a busy machine blurs the times of the real ones.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NamedTuple

from medusa_adapters.bench.process import cpu_s
from medusa_adapters.bench.result import Result, Target, targets_table
from medusa_adapters.bench.served_instance import ServedInstance, serve_command

_FUNCTION = 'def handle(request):\n    return {"bytes": len(request.body)}\n'
_BODY = b'{"name": "you"}'
_HEAD = b"POST / HTTP/1.1\r\nHost: slow\r\nContent-Type: application/json\r\n"
SLOW = (
    _HEAD,
    _HEAD + b"Content-Length: 2000\r\n\r\n{",
    _HEAD + b"Content-Length: 30000000\r\n\r\n{",
    _HEAD + b"Transfer-Encoding: chunked\r\n\r\n1000000\r\n{",
)
_BETWEEN_S = 0.05
_AT_A_TIME = 10
_LARGEST_MB, _BUDGET_MB, _UNFINISHED = 32, 256, 64
_MOST_TIMES = 2.0


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[ServedInstance]:
    """A `medusa serve` that is ready."""
    with tempfile.TemporaryDirectory(prefix="m") as folder:
        handler = Path(folder, "handler.py")
        handler.write_text(_FUNCTION)
        command = serve_command("--handler", f"{handler}:handle", "--log-level", "warning", *arguments)
        with ServedInstance(command, {"TMPDIR": folder}) as instance:
            instance.wait_ready(every_s=0.05)
            yield instance


def _worker(pid: int) -> int:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if Path(f"/proc/{child}/comm").read_text().strip() == "worker":
            return int(child)
        if found := _worker(int(child)):
            return found
    return 0


def be_slow(port: int, count: int, begun: Event, ended: Event) -> None:
    """In a process of its own: ``count`` clients, each of which sends a byte a second."""
    clients: dict[int, socket.socket] = {}
    while not ended.is_set():
        began = time.monotonic()
        for number in range(count):
            try:
                if number not in clients:
                    clients[number] = socket.create_connection(("127.0.0.1", port), timeout=5)
                    clients[number].setblocking(False)
                    clients[number].sendall(SLOW[number % len(SLOW)])
                else:
                    clients[number].sendall(b"x")
                    if _refused(clients[number]):
                        clients.pop(number).close()
            except OSError:
                if number in clients:
                    clients.pop(number).close()
            if number % _AT_A_TIME == 0:
                time.sleep(max(0.0, began + number / count - time.monotonic()))
        begun.set()
        time.sleep(max(0.0, began + 1.0 - time.monotonic()))
    for client in clients.values():
        client.close()


def _refused(client: socket.socket) -> bool:
    try:
        client.recv(65536)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def slow_clients(port: int, count: int) -> Iterator[None]:
    """They are there, and have been for a moment, until the end of the block."""
    begun, ended = multiprocessing.Event(), multiprocessing.Event()
    process = multiprocessing.Process(target=be_slow, args=(port, count, begun, ended))
    process.start()
    try:
        begun.wait(60)
        time.sleep(2.0)
        yield
    finally:
        ended.set()
        process.join()


def ask_for(port: int, clients: int, seconds: float) -> list[float]:
    """Seconds of each request of so many clients, each with a connection of its own and a pause between requests."""
    took: list[float] = []
    end = time.monotonic() + seconds

    def ask(number: int) -> None:
        time.sleep(_BETWEEN_S * number / clients)
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            while time.monotonic() < end:
                began = time.monotonic()
                connection.request("POST", "/", _BODY, {"Content-Type": "application/json"})
                response = connection.getresponse()
                response.read()
                assert response.status == 200, response.status
                took.append(time.monotonic() - began)
                time.sleep(max(0.0, began + _BETWEEN_S - time.monotonic()))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took


class ReaderQueue(NamedTuple):
    """``cpu``: what all of the server's processes used, in CPU seconds a second."""

    p99_ms: float
    cpu: float


def turn(instance: ServedInstance, clients: int, seconds: float) -> ReaderQueue:
    before, began = cpu_s(instance.tree()), time.monotonic()
    took = ask_for(instance.port, clients, seconds)
    used = sum(cpu_s(instance.tree()).values()) - sum(before.values())
    return ReaderQueue(statistics.quantiles(took, n=100)[98] * 1e3, used / (time.monotonic() - began))


def unfinished_bodies(port: int, worker: int, count: int, size_bytes: int) -> float:
    """MB by which the worker grows under so many bodies of which all but the last byte is offered."""
    ask_for(port, 4, 0.5)
    before = _resident_mb(worker)
    head = _HEAD + f"Content-Length: {size_bytes}\r\n\r\n".encode()
    piece = bytes(1 << 20)
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    left = dict.fromkeys(clients, size_bytes - 1)
    most = 0.0
    try:
        for client in clients:
            client.sendall(head)
            client.setblocking(False)
        end = time.monotonic() + 15
        while time.monotonic() < end:
            for client in clients:
                with contextlib.suppress(OSError):
                    left[client] -= client.send(piece[: left[client]]) if left[client] else 0
            most = max(most, _resident_mb(worker) - before)
    finally:
        for client in clients:
            client.close()
    return most


def _resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    alone: list[ReaderQueue] = []
    beside: list[ReaderQueue] = []
    with serving() as instance:
        ask_for(instance.port, arguments.clients, 1.0)
        for _turn in range(arguments.turns):
            alone.append(turn(instance, arguments.clients, arguments.seconds))
            with slow_clients(instance.port, arguments.slow):
                beside.append(turn(instance, arguments.clients, arguments.seconds))
            time.sleep(3.0)  # what was read of large bodies is given back
    with serving("--max-body-mb", str(_LARGEST_MB), "--body-memory-mb", str(_BUDGET_MB)) as instance:
        grown_mb = unfinished_bodies(instance.port, _worker(instance.pid), _UNFINISHED, _LARGEST_MB * 1_000_000)
    result = Result()
    for where, turns in (("alone", alone), (f"beside {arguments.slow} slow ones", beside)):
        result.add(f"{arguments.clients} clients", f"p99 {where}", "ms", [each.p99_ms for each in turns])
        result.add("the server", f"CPU {where}", "s/s", [each.cpu for each in turns])
    result.add(f"{_UNFINISHED} unfinished bodies of {_LARGEST_MB} MB", "growth of the worker", "MB", [grown_mb])
    times = statistics.median(each.p99_ms for each in beside) / statistics.median(each.p99_ms for each in alone)
    targets = [
        Target(f"p99 beside {arguments.slow} slow clients, times that without", times, _MOST_TIMES, at_least=False),
        Target("MB of the worker under unfinished bodies", grown_mb, _BUDGET_MB, at_least=False),
    ]
    print(result.table(), targets_table(targets), sep="\n\n")
    if arguments.json is not None:
        result.write(arguments.json)
    return 0 if all(target.met for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
