"""SIGSTOP of the agent, its prefetchers and its engine processes: noticed within seconds, ended and replaced."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import NodeAwayError, NodeError
from medusa_runtime.node.client import NodeClient
from medusa_runtime.process import ReportPipe
from medusa_runtime.timeline import Timeline
from process_tree import alive, stopped
from waiting import until

pytestmark = [pytest.mark.timeout(300), pytest.mark.forked]

Start = Callable[..., Any]
Put = Callable[..., str]
MEDUSA = Path(sys.executable).with_name("medusa")


def ping(node: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [MEDUSA, "node", "ping", "--socket", node.socket, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_ping_tells_whether_the_agent_answers(start_node: Start) -> None:
    node = start_node()
    assert ping(node).returncode == 0
    os.kill(node.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    hung = ping(node, "--timeout-s", "0.5")
    assert hung.returncode == 1
    assert "did not answer 'hello' within 0.5 s; it hangs, or is stopped" in hung.stderr
    assert time.monotonic() - began < 30
    os.kill(node.process.pid, signal.SIGCONT)
    assert ping(node).returncode == 0
    node.kill()
    assert "cannot be reached" in ping(node).stderr
    assert ping(node, "--timeout-s", "soon").returncode == 2


def test_a_full_queue_of_connections_turns_no_caller_away(start_node: Start) -> None:
    """A caller that connects again and again keeps it full. Others once failed at once, and fetched for themselves."""
    node = start_node()
    os.kill(node.process.pid, signal.SIGSTOP)
    with ExitStack() as held:
        failed = 0
        while not failed:
            flooding = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            flooding.setblocking(False)
            failed = flooding.connect_ex(node.socket)
        assert failed == errno.EAGAIN
        with pytest.raises(NodeAwayError, match=r"took no connection within 0\.2 s; it hangs, is stopped, or too many"):
            NodeClient(node.socket, waits=20)
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.append(node.status()["pid"]))
        waiting.start()
        time.sleep(0.3)
        os.kill(node.process.pid, signal.SIGCONT)
        waiting.join(60)
        assert found == [node.process.pid]
    assert node.stop() == 0


@pytest.mark.slow
def test_an_agent_that_was_stopped_for_long_goes_on(start_node: Start) -> None:
    """A suspended machine is no hang: the watchdog finds one missed look and not two."""
    node = start_node()
    os.kill(node.process.pid, signal.SIGSTOP)
    time.sleep(8)
    os.kill(node.process.pid, signal.SIGCONT)
    time.sleep(1)
    assert node.reachable()
    assert node.stop() == 0


HANG = """
import runpy, sys, time
from medusa_runtime.node.regions import revalidation
tick = revalidation.Revalidation.tick
def hang(self, regions):
    tick(self, regions)
    if list(regions):
        while True:
            time.sleep(0.1)
revalidation.Revalidation.tick = hang
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_an_agent_whose_loop_hangs_ends_itself(start_node: Start, put_model: Put) -> None:
    node = start_node(wrapper=[sys.executable, "-c", HANG])
    url = put_model("m")
    began = time.monotonic()
    client = node.client()

    def ask() -> None:
        client.region(url).close()
        while True:  # the region may have come before the loop hangs
            client.status()

    with pytest.raises(NodeError, match="went away"):
        ask()
    assert node.process.wait(120) == 70
    assert time.monotonic() - began < 30
    assert "the node agent has hung" in node.output()
    assert "in hang" in node.output(), "where it was"


NEVER_BEATS = """
import os, signal, time
from medusa_runtime.node import watchdog
os.sched_setaffinity(0, {0})
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1000))
watchdog.Watchdog(every_s=0.3).start()
print("started", flush=True)
while True:
    pass
"""

TAKES_A_CPU = """
import os
os.sched_setaffinity(0, {0})
print("started", flush=True)
while True:
    pass
"""


def test_an_agent_that_gets_no_cpu_is_not_taken_for_one_that_hangs() -> None:
    """It has a twelfth of a CPU at most, whatever else runs here. Then it waits for something else than a CPU."""
    with ExitStack() as running:

        def start(program: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-c", program]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            running.enter_context(process)
            running.callback(process.kill)
            assert process.stdout
            assert process.stdout.readline() == b"started\n"
            return process

        others = [start(TAKES_A_CPU) for _ in range(11)]
        starved = start(NEVER_BEATS)
        time.sleep(3)
        assert starved.poll() is None
        for other in others:
            other.kill()
        starved.send_signal(signal.SIGUSR1)
        _, said = starved.communicate(timeout=120)
        assert b"has hung for 0.3 s" in said
        assert starved.returncode == 70


ALARMS = """
import signal
from medusa_runtime.node import watchdog
watchdog.Watchdog(every_s=100).start()
for _ in range(9):
    signal.raise_signal(signal.SIGALRM)
"""


def test_alarms_that_come_at_once_are_one_check() -> None:
    """A process that had no CPU for a while finds an alarm waiting, and gets the next one at once."""
    ended = subprocess.run([sys.executable, "-c", ALARMS], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr


STOPS_AFTER_A_MISS = """
import os, signal, time
from medusa_runtime.node import watchdog
watch = watchdog.Watchdog(every_s=0.3)
watch.start()
while not watch._missed:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGSTOP)
watch.beat()
"""


def test_a_process_that_is_stopped_just_after_it_has_missed_a_check_goes_on() -> None:
    """Each check counts as missed until the loop comes round again, which a moment later is too late."""
    with subprocess.Popen([sys.executable, "-c", STOPS_AFTER_A_MISS], stderr=subprocess.PIPE, text=True) as process:
        until(lambda: stopped(process.pid) or process.poll() is not None)
        time.sleep(1)
        process.send_signal(signal.SIGCONT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said


def test_a_stopped_prefetcher_is_ended_and_its_readers_are_told(start_node: Start, put_model: Put, origin: Any) -> None:
    url = put_model("m", 8 << 20)
    origin.bytes_per_s = 1e6
    node = start_node()
    client = node.client()
    region = client.region(url)
    (prefetcher,) = node.children()
    os.kill(prefetcher, signal.SIGSTOP)
    began = time.monotonic()
    node.until(lambda: not alive(prefetcher))
    assert time.monotonic() - began < 30, "3 s, where nothing else has the cores"
    assert "its prefetcher ended early" in str(client.read_loss())
    assert node.status()["replaced"] == {"prefetcher": 1}
    origin.bytes_per_s = None
    again = node.client().region(url)
    for name in again.wait_index(60).order:
        again.wait_tensor(name, 60)
    for one in (region, again):
        one.close()


def test_a_stopped_idle_engine_and_a_stopped_zygote_are_replaced(start_node: Start) -> None:
    node = start_node("--prewarm", "torch=1")
    node.wait_warm()
    (engine,) = node.status()["engines"]["torch"]["pids"]
    os.kill(engine, signal.SIGSTOP)
    node.until(lambda: engine not in node.status()["engines"]["torch"]["pids"])
    node.until(lambda: not alive(engine))  # its channel closes before it has ended
    node.wait_warm()
    (zygote,) = [pid for pid, name in node.children().items() if name == "torch-zygote"]
    (engine,) = node.status()["engines"]["torch"]["pids"]
    os.kill(zygote, signal.SIGSTOP)
    node.until(lambda: not alive(zygote) and not alive(engine))
    node.wait_warm()
    assert node.stop() == 0


def test_a_stopped_engine_is_given_to_nobody_and_one_of_a_function_is_ended(start_node: Start, put_model: Put) -> None:
    node = start_node("--prewarm", "torch=1")
    node.wait_warm()
    (engine,) = node.status()["engines"]["torch"]["pids"]
    mine, theirs = socket.socketpair()
    timeline, reports, listener = Timeline.create("t"), ReportPipe(), socket.socket(socket.AF_UNIX)
    given = [listener.fileno(), timeline.fd, reports.write_fd, theirs.fileno()]
    url = put_model("m")
    with closing(NodeClient(node.socket)) as client:
        client.region(url).close()
        os.kill(engine, signal.SIGSTOP)
        node.until(lambda: stopped(engine))
        with pytest.raises(NodeError, match="no idle torch engine process is warm"):
            client.engine("torch", {}, given)
        os.kill(engine, signal.SIGCONT)
        listener.bind(str(node.folder / "engine.sock"))
        listener.listen()
        assert client.engine("torch", {"model": url, "state": "none"}, given) == engine
        theirs.close()
        os.kill(engine, signal.SIGSTOP)
        node.until(lambda: not alive(engine))
        mine.settimeout(120)
        assert mine.recv(1) == b"", "the function learns of it as of any end"
    node.until(lambda: node.status()["engines"]["torch"]["serving"] == 0)
    for one in (mine, listener):
        one.close()
    timeline.close()
    reports.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_nothing_is_left_of_an_agent_that_is_killed_or_stopped_and_killed(
    start_node: Start, put_model: Put, origin: Any, number: signal.Signals
) -> None:
    origin.bytes_per_s = 1e6
    node = start_node("--prewarm", "torch=1")
    node.wait_warm()
    client = node.client()
    client.region(put_model("m", 8 << 20)).close()
    children = node.children()
    assert set(children.values()) == {"prefetcher", "torch-zygote", "engine"}
    os.kill(node.process.pid, number)
    node.kill()
    node.until(lambda: not any(alive(pid) for pid in children))
    node.start()
    assert node.reachable()
