"""The keeper of a node server, and who watches the controller: what is killed, stops or hangs is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from medusa_cluster.node.processes import ping_watchdog
from medusa_cluster.node.processes.ping_watchdog import PingWatchdog
from process_tree import Unloaded, alive, children, stopped
from waiting import until

# It says who it is, and what it has started, in a session of its own.
SERVER = """
import os, signal, subprocess, sys, time
from medusa_cluster.node.processes.keeper import keep
asked = []
kept = keep()
if isinstance(kept, int):
    sys.exit(kept)
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
while True:
    time.sleep(60)
"""
# At the second fork there is no room for a process.
FORKS = """
import os
fork, calls = os.fork, []
def limited():
    calls.append(None)
    if len(calls) == 2:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = limited
"""
WATCHING = """
import os, signal, sys, threading, time
from medusa_cluster.node.processes.keeper import keep
from medusa_runtime import liveness
liveness.SILENT_S = 1.0
lock = threading.Lock()
signal.signal(signal.SIGUSR1, lambda *_: (lock.acquire(), lock.acquire()))
kept = keep()
if isinstance(kept, int):
    sys.exit(kept)
print(os.getpid(), 0, flush=True)
while kept.check():
    time.sleep(0.1)
print("forsaken", flush=True)
kept.end()
time.sleep(60)
"""
HUNG = """
import sys, time
from medusa_cluster.node.processes.keeper import keep
from medusa_runtime.node.watchdog import Watchdog
kept = keep()
if isinstance(kept, int):
    sys.exit(kept)
Watchdog("the node server", 0.1).start()
print("started", flush=True)
time.sleep(600)
"""

Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    started = []

    def start(code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline()


def pids(process: subprocess.Popen[str]) -> tuple[int, int]:
    server, child = line(process).split()
    return int(server), int(child)


def test_a_node_server_that_is_killed_is_replaced_when_nothing_of_it_is_left(start: Start) -> None:
    keeper = start(SERVER)
    server, child = pids(keeper)
    os.kill(server, signal.SIGKILL)
    second, _ = pids(keeper)
    assert second != server
    assert not alive(child)
    assert children(keeper.pid) == [second]


def test_a_node_server_is_replaced_once_there_is_room_for_a_process(start: Start) -> None:
    keeper = start(FORKS + SERVER)
    server, _ = pids(keeper)
    os.kill(server, signal.SIGKILL)
    second, _ = pids(keeper)
    assert children(keeper.pid) == [second]


def test_a_node_server_that_is_stopped_is_replaced_within_three_seconds(start: Start) -> None:
    keeper = start(SERVER)
    server, _ = pids(keeper)
    os.kill(server, signal.SIGSTOP)
    clock = Unloaded(keeper.pid)
    while stopped(server) or alive(server):
        assert clock.passed_s() <= 3
        time.sleep(0.01)
    assert pids(keeper)[0] != server


def test_a_node_server_whose_loop_hangs_is_replaced(start: Start) -> None:
    keeper = start(HUNG)
    assert (line(keeper), line(keeper)) == ("started\n", "started\n")


def test_what_is_asked_of_the_keeper_reaches_the_node_server_once(start: Start) -> None:
    keeper = start(SERVER)
    pids(keeper)
    os.killpg(keeper.pid, signal.SIGINT)  # as a terminal does
    assert line(keeper) == "interrupted\n"
    keeper.terminate()
    assert keeper.wait(60) == 7
    assert line(keeper) == ""


def test_nothing_is_left_of_a_keeper_that_is_killed(start: Start) -> None:
    keeper = start(SERVER)
    server, _ = pids(keeper)
    keeper.kill()
    until(lambda: not alive(server))


def test_a_keeper_that_is_stopped_goes_on_within_three_seconds(start: Start) -> None:
    keeper = start(WATCHING)
    server, _ = pids(keeper)
    os.kill(keeper.pid, signal.SIGSTOP)
    clock = Unloaded(server)
    until(lambda: stopped(keeper.pid))
    while stopped(keeper.pid):
        assert clock.passed_s() <= 3
        time.sleep(0.01)
    os.kill(server, signal.SIGKILL)
    assert pids(keeper)[0] != server


def test_a_node_server_whose_keeper_hangs_ends_with_it(start: Start) -> None:
    keeper = start(WATCHING)
    server, _ = pids(keeper)
    keeper.send_signal(signal.SIGUSR1)
    assert line(keeper) == "forsaken\n"
    assert keeper.wait(60) == -signal.SIGKILL
    until(lambda: not alive(server))


CONTROLLER = """
import asyncio, os, sys, time
from pathlib import Path
from medusa_cluster.json_lines import JsonLinesServer

async def answer(request):
    print(request["op"], flush=True)
    if asked:
        time.sleep(60)
    asked.append(request)
    return os.getpid()

async def run():
    await JsonLinesServer(Path(sys.argv[1]), answer).start()
    print("listening", flush=True)
    await asyncio.Event().wait()

asked = []
asyncio.run(run())
"""


def watch_until_it_ends(controller: subprocess.Popen[str], path: Path) -> None:
    async def watch() -> None:
        watchdog = PingWatchdog("the controller", path, answers_within_s=0.5, title="ray::Controller")
        watching = asyncio.create_task(watchdog.run())
        while controller.poll() is None:
            await asyncio.sleep(0.02)
        watching.cancel()

    try:
        asyncio.run(watch())
    finally:
        controller.kill()
    assert controller.wait() == -signal.SIGKILL


def test_a_controller_that_hangs_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "controller.sock"
    with subprocess.Popen([sys.executable, "-c", CONTROLLER, path], stdout=subprocess.PIPE, text=True) as controller:
        assert line(controller) == "listening\n"
        watch_until_it_ends(controller, path)
        assert controller.stdout
        assert controller.stdout.read() == "ping\nping\n"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("listens", [True, False])
def test_a_controller_that_hangs_before_its_first_answer_is_killed(
    tmp_path: Path, listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ping_watchdog, "_FIRST_ANSWER_S", 1.0)
    path = tmp_path / "controller.sock"
    silent = "print('starting', flush=True); import time; time.sleep(600)"
    command = [sys.executable, "-c", CONTROLLER, path] if listens else ["ray::Controller.__init__", "-c", silent]
    with subprocess.Popen(command, executable=sys.executable, stdout=subprocess.PIPE, text=True) as controller:
        line(controller)
        controller.send_signal(signal.SIGSTOP)
        watch_until_it_ends(controller, path)


@pytest.mark.timeout(60)
def test_a_controller_that_hangs_while_many_wait_for_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "controller.sock"
    with (
        subprocess.Popen([sys.executable, "-c", CONTROLLER, path], stdout=subprocess.PIPE, text=True) as controller,
        ExitStack() as waiting,
    ):
        assert line(controller) == "listening\n"

        def crowd() -> None:
            assert line(controller) == "ping\n"  # and then it answers nobody
            for _ in range(300):
                one = waiting.enter_context(socket.socket(socket.AF_UNIX))
                one.setblocking(False)
                with suppress(BlockingIOError):
                    one.connect(str(path))
                    one.send(b'{"op": "status"}\n')

        crowding = threading.Thread(target=crowd)
        crowding.start()
        watch_until_it_ends(controller, path)
        crowding.join()
