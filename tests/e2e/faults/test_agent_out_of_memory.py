"""The kernel's kill for want of memory, of a node agent and each of its processes, in whatever they are doing."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import MedusaError
from memory_group import MemoryGroup, group
from process_tree import alive, open_files
from slow_origin import SlowAfterAWhile, SlowOrigin, serving_origin
from waiting import until

from .asking import LONG, SHORT, Requests, shared_files

__all__ = ["group"]

Start = Callable[..., Any]
FALLBACK = "starting without the node agent"
NAMED = "memory ran out, the limit is "
AGENT = ("--prewarm", "torch=1", "--memory-budget", "300MB", "--ready-memory", "16MB", "--look-every-s", "0")
LARGE_BYTES = 64 << 20  # of a model whose memory a process of its own gives back
PHASES = {
    "idle": ("agent", "torch-zygote", "engine", "spare"),
    "fetch": ("agent", "prefetcher", "torch-zygote"),
    "serve": ("agent", "torch-zygote", "engine"),
    "drop": ("agent",),
}

pytestmark = [pytest.mark.slow, pytest.mark.root]


@pytest.fixture
def slow_origin(example: Path) -> Iterator[SlowOrigin]:
    with serving_origin(example, 1e4, SlowAfterAWhile) as server:
        yield server


@pytest.fixture
def large(tmp_path: Path) -> Iterator[str]:
    """The URL of a model of one large tensor."""
    head = json.dumps({"weight": {"dtype": "U8", "shape": [LARGE_BYTES], "data_offsets": [0, LARGE_BYTES]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(LARGE_BYTES))
    (tmp_path / "config.json").write_text('{"model_type": "one"}')
    with serving_origin(tmp_path, bytes_per_s=1e12) as server:
        yield server.url


class Phase:
    """What an agent does when one of its processes is killed: it works for a function, or fetches and drops."""

    def __init__(self, name: str, node: Any, start: Start, origin: SlowOrigin, large: str) -> None:
        self.name, self.node, self.large = name, node, large
        self.serving: Any = None
        self.warm: int = node.status()["engines"]["torch"]["pids"][0]
        self.dropped = 0
        self._ended = threading.Event()
        self._dropping = threading.Thread(target=self._fetch_and_drop, daemon=True)
        if name == "drop":
            self._dropping.start()
            until(lambda: self.dropped > 1, node.output)
        elif name != "idle":
            if name == "serve":
                origin.bytes_per_s = 1e9
            self.serving = start("--model", origin.url, "--node-socket", node.socket)
            self.requests = Requests(self.serving)
            self.requests.begin(SHORT if name == "fetch" else LONG, 2)
            reached = self._fetches if name == "fetch" else self._runs
            until(reached, self.serving.output)
            # A zygote that replaces the taken engine during the kill would pass its mark on to the new one.
            node.wait_warm()

    def _fetches(self) -> bool:
        regions = self.node.status()["regions"]
        return any(held["state"] == "fetching" and held["fetched_bytes"] for held in regions)

    def _runs(self) -> bool:
        metrics = self.serving.request("GET", "/metrics")[1]
        return bool(re.search(rb"(?m)^medusa_engine_running(\{.*\})? 2(\.0)?$", metrics))

    def _fetch_and_drop(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(MedusaError), contextlib.closing(self.node.client()) as client:
                with contextlib.closing(client.region(self.large)) as region:
                    region.wait_tensor("weight", 30)
                client.close()
                with contextlib.closing(self.node.client()) as other:
                    other.drop(self.large)
                    self.dropped += 1

    def victim(self, name: str) -> int:
        """The process to be killed; of engines, the one that was warm first, which the function has."""
        if name == "agent":
            return int(self.node.process.pid)
        if name == "engine":
            return self.warm
        until(lambda: name in self.node.children().values(), self.node.output)
        return next(pid for pid, found in self.node.children().items() if found == name)

    def end(self, killed: str) -> None:
        """Check how the requests ended, and that the function, if there is one, goes on and ends in order."""
        if self.name == "drop":
            dropped = self.dropped
            until(lambda: self.dropped > dropped + 1, self.node.output)  # by the next agent
            self._ended.set()
            self._dropping.join()
        if self.serving is None:
            return
        assert self.serving.complete()["choices"][0]["text"]
        failed = [(status, body["error"]["code"]) for status, body in self.requests.end() if status != 200]
        assert set(failed) == ({(503, "Engine.Failed")} if (self.name, killed) == ("serve", "engine") else set())
        output = self.serving.output()
        assert output.count(FALLBACK) == (self.name == "fetch" and killed in ("agent", "prefetcher")), output
        if killed == "prefetcher":
            assert f"its prefetcher ended early (killed by SIGKILL: {NAMED}" in output
        assert self.serving.stop() == 0


@pytest.mark.parametrize(("phase", "name"), [(phase, name) for phase, names in PHASES.items() for name in names])
@pytest.mark.parametrize("group", [3000, 1000], indirect=True)
def test_each_process_of_an_agent(
    group: MemoryGroup,
    start_node: Start,
    start: Start,
    slow_origin: SlowOrigin,
    large: str,
    phase: str,
    name: str,
) -> None:
    shared = shared_files()
    node = start_node(*AGENT, wrapper=group.inside)
    node.wait_warm()
    until(lambda: node.status()["ready_bytes"], node.output)
    before = len(open_files(node.process.pid))
    reached = Phase(phase, node, start, slow_origin, large)
    children, victim = node.children(), reached.victim(name)
    group.kill(victim)
    slow_origin.bytes_per_s = 1e9
    until(lambda: not alive(victim), node.output)
    if name == "agent":
        assert node.process.wait(60) == -signal.SIGKILL
        lent = {reached.warm} if reached.serving else set()  # the function's engine lives as long as it
        until(lambda: not [pid for pid in children if alive(pid) and pid not in lent], lambda: f"{children} {lent}")
        node.start()
    else:
        assert node.process.poll() is None, node.output()
        until(lambda: NAMED in node.output(), node.output)
    node.wait_warm()
    assert victim not in node.children()
    reached.end(name)
    with contextlib.closing(node.client()) as client, contextlib.closing(client.region(slow_origin.url)) as region:
        for tensor in region.wait_index(30).order:
            region.wait_tensor(tensor, 30)
    with contextlib.closing(node.client()) as client:
        client.drop(slow_origin.url)
    until(lambda: node.status()["regions"] == [] and node.status()["ready_bytes"], node.output)
    node.wait_warm()
    until(
        lambda: len(open_files(node.process.pid)) <= before,
        lambda: f"{open_files(node.process.pid)}, {before} before {node.output()}",
    )
    assert node.stop() == 0
    until(lambda: group.shared_bytes() == 0, lambda: f"{group.shared_bytes()} bytes of shared memory")
    assert shared_files() <= shared
    assert group.kills() == 1
