"""A function of another user that is given an engine process: what it hands over, and how much it may take."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_fixtures import write_checkpoint
from medusa_runtime.container_limits import cpu_count
from medusa_runtime.errors import NodeError
from medusa_runtime.node.client import NodeClient
from medusa_runtime.node.engines.handover import with_own_threads
from medusa_runtime.process import ReportPipe
from medusa_runtime.timeline import Timeline
from strangers import ALICE, MALLORY, as_user

pytestmark = [pytest.mark.root, pytest.mark.timeout(200), pytest.mark.forked]

Start = Callable[..., Any]
Put = Callable[..., str]


def test_an_engine_process_is_given_nothing_to_write_to_that_its_function_may_not(
    start_node: Start, put_model: Put, origin: Any
) -> None:
    url = put_model("m")
    node = start_node("--allow", origin.url, "--prewarm", "torch=1")

    def attack() -> str:
        client = NodeClient(node.socket)
        client.region(url).close()
        readable = os.open("/etc/passwd", os.O_RDONLY)
        a, b = socket.socketpair()
        pipe = os.pipe()[1]
        found = []
        for given in ([readable] * 4, [a.fileno(), readable, pipe, b.fileno()]):
            try:
                client.engine("torch", {}, given)
            except NodeError as error:
                found.append(str(error))
        return "; ".join(found)

    said = as_user(MALLORY, attack)
    assert "expected a socket among the descriptors" in said
    assert "expected a timeline in shared memory" in said


def test_an_engine_process_does_for_others_nothing_but_compute(start_node: Start, put_model: Put, origin: Any) -> None:
    """Flags of vLLM can name a file of code, which once ran with the agent's rights."""
    url = put_model("m")
    node = start_node("--allow", origin.url, "--prewarm", "torch=1")
    node.wait_warm()
    settings: tuple[dict[str, Any], ...] = (
        {"vllm_args": "--trust-remote-code"},
        {"vllm_mode": "compatible"},
        {"tensor_parallel": 2},
        {"group": "/tmp/group.json"},
        {"engine": "cluster"},
        {"engine": "cluster", "cluster": "http://127.0.0.1:1", "cluster_token_file": "/etc/hostname"},
        {"cluster_token_file": "/etc/hostname"},
        {"api_key_file": "/etc/hostname"},
        {},  # on a GPU of its choice
    )

    def attack() -> str:
        timeline, reports, listener = Timeline.create("t"), ReportPipe(), socket.socket(socket.AF_UNIX)
        client, ends = NodeClient(node.socket), socket.socketpair()
        client.region(url).close()
        given = [listener.fileno(), timeline.fd, reports.write_fd, ends[0].fileno()]
        found = []
        for each in settings:
            try:
                client.engine("torch", {"model": url, "state": "none", **each}, given, None if each else "1")
                found.append("taken")
            except NodeError as error:
                found.append(str(error))
        return json.dumps(found)

    refused = json.loads(as_user(MALLORY, attack))
    for each, message in zip(settings, refused, strict=True):
        expected = "which was asked for" if "engine" in each else "has its user's rights"
        assert expected in message, each
    assert node.status()["engines"]["torch"]["taken"] == 0


def test_an_engine_process_for_others_has_no_more_threads_than_there_are_cpus() -> None:
    """torch makes all of them, and each takes a process id of the agent's container."""
    settings = {"threads": 1_000_000, "dtype": "auto"}
    assert with_own_threads(settings) == {"threads": cpu_count(), "dtype": "auto"}
    assert with_own_threads({"threads": 1}) == {"threads": 1}
    assert with_own_threads({"threads": None}) == {"threads": None}
    for threads in (0, True, "2", 1.5):
        with pytest.raises(NodeError, match="threads: expected a whole number above 0"):
            with_own_threads({"threads": threads})


def test_the_last_warm_engine_is_left_to_others_by_one_that_has_just_taken_one(
    start_node: Start, put_model: Put, origin: Any
) -> None:
    """A function could take each process as soon as it was warm, and others never had one."""
    url = put_model("m")
    pause = "pause=600"
    node = start_node("--allow", origin.url, "--prewarm", "torch=1", "--memory-budget", "4GB", "--per-caller", pause)

    def take() -> str:
        timeline, reports, listener = Timeline.create("t"), ReportPipe(), socket.socket(socket.AF_UNIX)
        client, ends = NodeClient(node.socket), socket.socketpair()
        client.region(url).close()
        given = [listener.fileno(), timeline.fd, reports.write_fd, ends[0].fileno()]
        try:
            client.engine("torch", {"model": url, "state": "none", "kv_cache_mb": 64}, given)
        except NodeError as error:
            return str(error)
        return "taken"

    for user, said in (
        (MALLORY, "taken"),
        (MALLORY, "taken"),  # nobody else has asked for any
        (ALICE, "taken"),
        (MALLORY, "the last warm torch engine process is left to other callers than user 1001 for "),
        (ALICE, "the last warm torch engine process is left to other callers than user 1000 for "),
        (os.geteuid(), "taken"),  # this one could also end the agent
    ):
        node.wait_warm()
        assert as_user(user, take).startswith(said)


def test_engines_and_their_caches_are_limited(start_node: Start, origin: Any, tmp_path: Path) -> None:
    for file in write_checkpoint(tmp_path).glob("*.*"):  # one that an engine serves until it is told to end
        origin.put(f"/m/{file.name}", file.read_bytes())
    url = f"{origin.url}/m"
    limits = "engines=1,memory=1GB"
    node = start_node("--allow", origin.url, "--prewarm", "torch=1", "--memory-budget", "4GB", "--per-caller", limits)
    node.wait_warm()

    def attack() -> str:
        timeline, reports, listener = Timeline.create("t"), ReportPipe(), socket.socket(socket.AF_UNIX)
        listener.bind("")  # an address of the kernel's choice
        listener.listen()
        found, ends = [], []
        for settings in ({"kv_cache_mb": 5000}, {"kv_cache_mb": "many"}, {"kv_cache_mb": 64}, {}):
            client = NodeClient(node.socket)
            client.region(url).close()
            ends.append(socket.socketpair())
            given = [listener.fileno(), timeline.fd, reports.write_fd, ends[-1][0].fileno()]
            try:
                client.engine("torch", {"model": url, "state": "none", **settings}, given)
                found.append(json.dumps(NodeClient(node.socket).status()["engines"]["torch"]["taken"]))
            except NodeError as error:
                found.append(str(error))
        return "\n".join(found)

    too_large, no_number, taken, another = as_user(MALLORY, attack).split("\n")
    assert "an engine with 5000 MB for keys and values is too large: user 1001 may have" in too_large
    assert "kv_cache_mb: expected a whole number above 0, found 'many'" in no_number
    assert taken == "1"
    assert "user 1001 has 1 engines of the node agent's already" in another
    node.until(lambda: node.status()["callers"].get("user 1001") is None)  # the engine ends with its function
    assert node.status()["engines"]["torch"]["serving"] == 0
