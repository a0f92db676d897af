"""The kernel's kill for want of memory, of each process in each phase: it is named, replaced, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from memory_group import MemoryGroup, group
from process_tree import alive
from slow_origin import SlowOrigin, serving_origin
from waiting import until

from .asking import LONG, SHORT, Requests, shared_files

__all__ = ["group"]

Start = Callable[..., Any]
REPLACED = ("prefetcher", "zygote", "engine", "worker")
PHASES = {
    "fetch": ("supervisor", "function", *REPLACED),
    "load": ("supervisor", "function", *REPLACED),
    "first-forward": ("supervisor", "function", *REPLACED),
    "decode": ("supervisor", "function", "zygote", "engine", "worker"),
    "idle": ("supervisor", "function", "zygote", "engine", "worker"),
}

pytestmark = [pytest.mark.slow, pytest.mark.root]


@pytest.fixture
def slow_origin(example: Path) -> Iterator[SlowOrigin]:
    with serving_origin(example, bytes_per_s=1e5) as server:
        yield server


def reach(phase: str, serving: Any, origin: SlowOrigin, requests: Requests) -> None:
    """Wait until the instance is in this phase, in which the origin's speed keeps it if need be."""

    def status() -> dict[str, Any]:
        return dict(serving.request("GET", "/readyz")[1])

    def running() -> bool:
        return bool(
            re.search(rb"(?m)^medusa_engine_running(\{.*\})? [12](\.0)?$", serving.request("GET", "/metrics")[1])
        )

    if phase in ("fetch", "load", "first-forward"):
        origin.bytes_per_s = 2e4  # to use up the memory takes seconds
    if phase == "fetch":
        until(lambda: 0 < status().get("fetched_bytes", 0) < status()["total_bytes"], serving.output)
    elif phase == "load":
        until(lambda: status().get("engine") == "loading", serving.output)
    elif phase == "first-forward":
        requests.begin(SHORT, 1)
        until(lambda: status().get("engine") == "loading", serving.output)
        until(running, serving.output)
    else:
        origin.bytes_per_s = 1e9
        serving.wait_ready()
        if phase == "decode":
            requests.begin(LONG, 2)
            until(running, serving.output)


def survivors(serving: Any, victim: int) -> dict[int, int]:
    """The open descriptors of the processes that live as long as the instance."""
    pids = {serving.process.pid, serving.child("function")} - {victim}
    return {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in pids}


@pytest.mark.parametrize(("phase", "name"), [(phase, name) for phase, names in PHASES.items() for name in names])
@pytest.mark.parametrize("group", [3000, 1000], indirect=True)
def test_each_process_in_each_phase(
    group: MemoryGroup, start: Start, slow_origin: SlowOrigin, phase: str, name: str
) -> None:
    serving = start("--model", slow_origin.url, wrapper=group.inside)
    requests = Requests(serving)
    serving.child("worker")
    reach(phase, serving, slow_origin, requests)
    pid = serving.process.pid if name == "supervisor" else serving.child(name)
    tree, shared, open_before = serving.children(), shared_files(), survivors(serving, pid)
    group.kill(pid)
    slow_origin.bytes_per_s = 1e9
    if name in REPLACED:
        check_replacement(serving, name, pid)
        check_answers(phase, name, requests.end())
        until(lambda: survivors(serving, pid) == open_before, lambda: f"{survivors(serving, pid)} {open_before}")
        assert serving.stop() == 0
    else:
        assert serving.wait_gone(tree) == (-signal.SIGKILL if name == "supervisor" else 1)
        answers = requests.end()
        assert isinstance(answers[-1], OSError) if phase in ("first-forward", "decode") else not answers
    if name != "supervisor":  # of which the platform reports it
        assert "killed by SIGKILL: memory ran out, the limit is " in serving.output()
    assert shared_files() <= shared
    assert group.kills() == 1


def check_replacement(serving: Any, name: str, pid: int) -> None:
    """Check that another process has the role of the killed one, and does its work."""
    until(lambda: not alive(pid), serving.output)
    serving.wait_ready()
    assert serving.complete()["choices"][0]["text"]
    assert pid not in serving.children()
    metrics = serving.request("GET", "/metrics")[1].decode()
    assert re.search(rf'(?m)^medusa_process_restarts_total{{process="{name}"[^}}]*}} 1$', metrics), metrics


def check_answers(phase: str, name: str, answers: list[Any]) -> None:
    """Check how requests ended that were under way when a process was killed: with an answer or one clear error."""
    if name == "worker":  # which had the connections
        assert phase not in ("first-forward", "decode") or any(isinstance(answer, OSError) for answer in answers)
        return
    failed = [(status, body["error"]["code"]) for status, body in answers if status != 200]
    if name == "prefetcher":
        assert not failed
    assert set(failed) <= {(503, "Engine.Failed")}
    assert failed or (phase, name) not in (("decode", "engine"), ("decode", "zygote"))
