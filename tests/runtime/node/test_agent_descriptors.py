"""An agent that can open no further file, as when its callers hold all that it may have: it refuses, and goes on."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import LimitError, MedusaError
from medusa_runtime.node.messages import send

pytestmark = [pytest.mark.timeout(120), pytest.mark.forked]

Start = Callable[..., Any]
Put = Callable[..., str]


@contextmanager
def room_for(pid: int, more: int) -> Iterator[None]:
    """Let a process open only so many more files."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = [number for number in range(len(used) + more + 1) if number not in used]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[more], before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def open_files(node: Any) -> int:
    return len(os.listdir(f"/proc/{node.process.pid}/fd"))


@pytest.mark.parametrize("more", range(6))
def test_a_fetch_for_which_there_is_no_room_leaves_nothing_behind(start_node: Start, put_model: Put, more: int) -> None:
    node = start_node()
    url = put_model("m")
    with closing(node.client()) as client:
        client.status()
        before = open_files(node)
        with room_for(node.process.pid, more):
            for _ in range(3):
                with pytest.raises(MedusaError):
                    client.region(url)
        node.until(lambda: open_files(node) == before)
        assert client.status()["callers"] == {f"user {os.getuid()}": {"connections": 1}}
        client.region(url).close()


@pytest.mark.parametrize("more", [0, 1])
def test_a_complete_region_that_cannot_be_opened_leaves_nothing_behind(
    start_node: Start, put_model: Put, more: int
) -> None:
    node = start_node()
    url = put_model("m")
    with closing(node.client()) as client:
        client.region(url).close()
        node.until(lambda: client.status()["regions"][0]["state"] == "done")
        before = open_files(node)
        with room_for(node.process.pid, more):
            for _ in range(3):
                with pytest.raises(LimitError):
                    client.region(url)
        assert open_files(node) <= before


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


def test_memory_that_cannot_be_made_ready_ends_no_agent(start_node: Start, put_model: Put) -> None:
    node = start_node("--ready-memory", "8Mi", "--log-level", "debug")
    with closing(node.client()) as client:
        node.until(lambda: client.status()["ready_bytes"] > 0)
        client.region(put_model("m")).close()  # by the process that waited
        with room_for(node.process.pid, 0):
            node.until(lambda: "open files" in node.output())
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


def test_a_local_model_of_more_shards_than_files_may_be_opened_is_refused(
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
        before = open_files(node)
        with room_for(node.process.pid, 20), pytest.raises(MedusaError, match="room for more open files"):
            client.region(str(tmp_path))
        node.until(lambda: open_files(node) == before)
        client.region(str(tmp_path)).close()
