"""An agent that can open no further file, as when its callers hold all that it may have: it refuses, and goes on."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import LimitError, MedusaError, NodeAwayError, NodeError
from medusa_runtime.node.client import NodeClient
from medusa_runtime.node.messages import channel_pair, close_without_linger, receive, send
from medusa_runtime.process import ReportPipe
from medusa_runtime.timeline import Timeline
from process_tree import open_files

pytestmark = [pytest.mark.timeout(120), pytest.mark.forked]

Start = Callable[..., Any]
Put = Callable[..., str]


@contextmanager
def room_for(pid: int, more: int) -> Iterator[None]:
    """Let a process open only so many more files."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = open_files(pid)
    free = [number for number in range(len(used) + more + 1) if number not in used]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[more], before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def fetch(node: Any, client: NodeClient, url: str) -> None:
    """Have the agent fetch a model, and wait for the end, after which the agent has fewer files open."""
    client.region(url).close()
    node.until(lambda: f"{url} is complete" in node.output())


@pytest.mark.parametrize("more", range(5))  # with five it may succeed
def test_a_fetch_for_which_there_is_no_room_leaves_nothing_behind(start_node: Start, put_model: Put, more: int) -> None:
    node = start_node()
    url = put_model("m")
    with closing(node.client()) as client:
        client.status()
        before = len(open_files(node.process.pid))
        with room_for(node.process.pid, more):
            for _ in range(3):
                with pytest.raises(MedusaError):
                    client.region(url)
        node.until(lambda: len(open_files(node.process.pid)) == before)
        node.until(lambda: client.status()["callers"] == {f"user {os.getuid()}": {"connections": 1}})
        client.region(url).close()


@pytest.mark.parametrize("more", range(10))
def test_whatever_room_a_fetch_has_its_caller_is_told(start_node: Start, put_model: Put, more: int) -> None:
    """Where it lacks one is another place each time: in the agent, the prefetcher's start, its fetch, or the answer."""
    node = start_node()
    url = put_model("m")
    with closing(node.client()) as client:
        client.status()
        with room_for(node.process.pid, more), suppress(LimitError):
            client.region(url).close()
        client.region(url).close()


def test_who_is_refused_a_region_does_not_hold_it(start_node: Start, put_model: Put) -> None:
    node = start_node()
    url = put_model("m")
    with closing(node.client()) as first, closing(node.client()) as second:
        fetch(node, first, url)
        second.status()
        with room_for(node.process.pid, 1), pytest.raises(LimitError):
            second.region(url)
        assert [region["in_use_by"] for region in second.status()["regions"]] == [1]
        second.region(url).close()


@pytest.mark.parametrize("more", [0, 1])
def test_a_complete_region_that_cannot_be_opened_leaves_nothing_behind(
    start_node: Start, put_model: Put, more: int
) -> None:
    node = start_node()
    url = put_model("m")
    with closing(node.client()) as client:
        fetch(node, client, url)
        before = len(open_files(node.process.pid))
        with room_for(node.process.pid, more):
            for _ in range(3):
                with pytest.raises(LimitError):
                    client.region(url)
        assert len(open_files(node.process.pid)) <= before


def test_a_caller_that_waited_is_refused_where_its_region_cannot_be_opened(
    start_node: Start, put_model: Put, origin: Any
) -> None:
    node = start_node()
    url = put_model("m")
    hold = threading.Event()
    origin.accept = lambda *_: hold.wait(60)
    with closing(node.client()) as client, closing(node.client()) as other:
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(client.region, url)
            node.until(lambda: [held["in_use_by"] for held in other.status()["regions"]] == [1])
            with room_for(node.process.pid, 0):
                hold.set()
                with pytest.raises(LimitError):
                    asked.result(60)
        node.until(lambda: [held["in_use_by"] for held in other.status()["regions"]] == [0])
        client.region(url).close()


def test_a_fetch_that_ends_while_no_file_can_be_opened_is_complete(
    start_node: Start, put_model: Put, origin: Any
) -> None:
    node = start_node()
    url = put_model("m")
    hold = threading.Event()
    origin.accept = lambda *_: hold.wait(60)
    with closing(node.client()) as client:
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(client.region, url)
            node.until(lambda: f"fetching {url}" in node.output())
            with room_for(node.process.pid, 0):
                hold.set()
                with pytest.raises(LimitError):
                    asked.result(60)
                node.until(lambda: f"{url} is complete" in node.output() or node.process.poll() is not None)
        assert client.status()["regions"][0]["state"] == "done"


def test_a_status_needs_no_descriptor(start_node: Start, put_model: Put) -> None:
    """Also that of a model whose index the agent has not read yet."""
    node = start_node()
    with closing(node.client()) as client:
        fetch(node, client, put_model("m"))
        with room_for(node.process.pid, 0):
            assert len(client.status()["regions"]) == 1


def test_a_caller_that_cannot_be_looked_at_is_not_taken_for_a_stranger(start_node: Start) -> None:
    """It would be refused as another container's root for as long as its connection lasts."""
    node = start_node()
    with room_for(node.process.pid, 1), pytest.raises(NodeAwayError):
        node.client()
    with closing(node.client()) as client:
        assert client.status()["socket"] == node.socket


def test_memory_that_cannot_be_made_ready_ends_no_agent(start_node: Start, put_model: Put) -> None:
    node = start_node("--ready-memory", "8Mi", "--log-level", "debug")
    with closing(node.client()) as client:
        node.until(lambda: client.status()["ready_bytes"] > 0)
        # Handing out a region takes three files, one of which stays. The next process that waits takes more.
        with room_for(node.process.pid, 3):
            client.region(put_model("m")).close()  # by the process that waited
            node.until(lambda: "expected room for" in node.output())
        assert client.status()["pid"] == node.process.pid


def test_an_engine_process_whose_connection_does_not_arrive_is_replaced(start_node: Start) -> None:
    node = start_node("--prewarm", "torch=1")
    node.wait_warm()
    with closing(node.client()) as client, ExitStack() as waiting:
        idle = client.status()["engines"]["torch"]["pids"][0]
        with room_for(node.process.pid, 0):
            for _ in range(2):  # they take what the process leaves behind
                connection = waiting.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                connection.connect(node.socket)
                send(connection, "hello", {"version": 1})
            os.kill(idle, signal.SIGKILL)
            node.until(lambda: "did not all arrive" in node.output())
        assert client.status()["engines"]["torch"]["failure"] is None
        node.until(lambda: client.status()["engines"]["torch"]["warm"] == 1)
        node.until(lambda: list(node.children().values()).count("engine") == 1)
    assert "failed" not in node.output(), "the one without a connection ends silently"


@pytest.mark.parametrize("more", [4, 5])
def test_who_is_refused_an_engine_for_lack_of_files_is_not_charged_for_it(
    start_node: Start, put_model: Put, more: int
) -> None:
    node = start_node("--prewarm", "torch=1")
    node.wait_warm()
    url = put_model("m")
    timeline, reports, listener = Timeline.create("t"), ReportPipe(), socket.socket(socket.AF_UNIX)
    mine, theirs = socket.socketpair()
    given = [listener.fileno(), timeline.fd, reports.write_fd, theirs.fileno()]  # four that the agent receives
    with mine, theirs, listener, closing(node.client()) as client:
        fetch(node, client, url)
        client.region(url).close()
        alone = {f"user {os.getuid()}": {"connections": 1}}
        node.until(lambda: client.status()["callers"] == alone)
        with room_for(node.process.pid, more), pytest.raises(LimitError):
            client.engine("torch", {"model": url, "state": "none", "kv_cache_mb": 16}, given)
        assert client.status()["callers"] == alone
    timeline.close()


def test_the_shards_of_a_local_model_take_one_file_of_the_agent(
    start_node: Start, tmp_path: Path, safetensors_file: Callable[..., bytes]
) -> None:
    places = {}
    for number in range(40):
        name, shard = f"model.layers.{number}.weight", f"model-{number:05}-of-00040.safetensors"
        (tmp_path / shard).write_bytes(safetensors_file({name: ("U8", [64], b"\1" * 64)}))
        places[name] = shard
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (tmp_path / "config.json").write_text("{}")
    node = start_node()
    client = [node.client() for _ in range(150)][-1]  # the prefetcher closes what these take, and so has more room
    with closing(client):
        client.status()
        with room_for(node.process.pid, 20):
            client.region(str(tmp_path)).close()


def test_a_socket_that_lingers_is_closed_at_once_where_no_file_can_be_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as tcp:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
        given = os.dup(tcp.fileno())
        with room_for(os.getpid(), 0):
            close_without_linger([given])
        lingers, _ = struct.unpack("ii", tcp.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8))
    assert not lingers


def test_an_agent_without_room_for_connections_logs_so_now_and_then(start_node: Start) -> None:
    node = start_node()
    with ExitStack() as waiting, room_for(node.process.pid, 0):
        connection = waiting.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        began = time.monotonic()
        connection.connect(node.socket)
        node.until(lambda: node.output().count("could not be accepted") >= 3)
    assert time.monotonic() - began > 2, "it says so once a second at most"


# Descriptors that are sent and that nobody has read: the kernel limits them for a user without rights of root's.

UNPRIVILEGED = ("setpriv", "--bounding-set", "-sys_resource,-sys_admin")
needs_setpriv = pytest.mark.skipif(not shutil.which("setpriv") or os.getuid() != 0, reason="needs setpriv, and root")


@contextmanager
def unread_descriptors(count: int) -> Iterator[None]:
    """Let this user have so many descriptors under way."""
    with ExitStack() as opened:
        for _ in range(count // 200 + 1):
            mine, theirs = channel_pair()
            opened.enter_context(mine), opened.enter_context(theirs)
            send(mine, "x", None, [mine.fileno()] * 200)
        yield


def test_a_caller_that_reads_nothing_is_given_one_region(start_node: Start, put_model: Put) -> None:
    """What waits to be read counts to the agent's user, and not to the caller."""
    node = start_node()
    url = put_model("m")
    node.client().region(url).close()
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as connection:
        connection.settimeout(60)
        connection.connect(node.socket)
        for kind, body in [("hello", {"version": 1}), *[("region", {"url": url})] * 40]:
            send(connection, kind, body)
        node.until(lambda: not any(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))))
        node.status()  # all that was sent before it has been answered
        answers = []
        while len(answers) < 41 and (answer := receive(connection)) is not None:
            answers.append(answer.kind)
            answer.close()
    assert answers == ["hello", "region", *["error"] * 39]


@needs_setpriv
def test_no_room_for_descriptors_under_way_costs_no_idle_engine(start_node: Start, put_model: Put) -> None:
    node = start_node("--prewarm", "torch=1", wrapper=UNPRIVILEGED)
    node.wait_warm()
    url = put_model("m")
    listener, timeline, reports, (mine, theirs) = (
        socket.socket(socket.AF_UNIX),
        Timeline.create("t"),
        ReportPipe(),
        channel_pair(),
    )
    given = [listener.fileno(), timeline.fd, reports.write_fd, theirs.fileno()]
    with closing(node.client()) as client, closing(node.client()) as other:
        client.region(url).close()
        idle = client.status()["engines"]["torch"]["pids"]
        with room_for(node.process.pid, 20), unread_descriptors(1000):
            with pytest.raises(NodeError, match="cannot hand an engine process to a function"):
                client.engine("torch", {}, given)
            with pytest.raises(NodeError, match="cannot send a region to a function"):
                other.region(url)
        assert client.status()["engines"]["torch"]["pids"] == idle
        assert client.engine("torch", {"unheard_of": 1}, given) == idle[0]
    for one in (listener, mine, theirs):
        one.close()
    timeline.close()
    reports.close()
