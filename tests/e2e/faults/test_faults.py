"""Processes killed and origins misbehaving in the middle of a start."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slow_origin import SlowOrigin, serving_origin

Start = Callable[..., Any]


@pytest.fixture
def slow_origin(example: Path) -> Iterator[SlowOrigin]:
    with serving_origin(example, bytes_per_s=1e6) as server:
        yield server


@pytest.mark.forked
def test_progress_is_visible_while_a_slow_origin_sends(start: Start, slow_origin: SlowOrigin) -> None:
    serving = start("--model", slow_origin.url)
    seen = []
    while (answer := serving.request("GET", "/readyz"))[0] == 503:
        seen.append(answer[1])
        time.sleep(0.05)
    assert any(0 < progress.get("fetched_bytes", 0) < progress.get("total_bytes", 0) for progress in seen), seen[-3:]
    assert serving.complete()["choices"][0]["text"]
    assert serving.stop() == 0


@pytest.mark.forked
def test_a_killed_prefetcher_is_replaced_and_nothing_is_fetched_twice(
    start: Start, slow_origin: SlowOrigin, example: Path
) -> None:
    serving = start("--model", slow_origin.url)
    while serving.request("GET", "/readyz")[1].get("fetched_bytes", 0) == 0:
        time.sleep(0.02)
    os.kill(serving.child("prefetcher"), signal.SIGKILL)
    slow_origin.bytes_per_s = 1e9
    assert serving.complete()["choices"][0]["text"]
    reference = start("--model", example)
    assert serving.complete(max_tokens=20)["choices"] == reference.complete(max_tokens=20)["choices"]
    assert reference.stop() == 0
    assert serving.stop() == 0


@pytest.mark.forked
def test_an_object_replaced_while_it_is_read_is_an_error(start: Start, slow_origin: SlowOrigin) -> None:
    slow_origin.bytes_per_s = 3e5
    serving = start("--model", slow_origin.url)
    while serving.request("GET", "/readyz")[1].get("total_bytes", 0) == 0:
        time.sleep(0.02)
    prefetcher = serving.child("prefetcher")
    os.kill(prefetcher, signal.SIGSTOP)  # or it might find the new object, and end, before it is killed
    slow_origin.replaced = True
    slow_origin.bytes_per_s = 1e9
    os.kill(prefetcher, signal.SIGKILL)
    assert serving.wait_gone() != 0
    assert "Storage.Changed" in serving.output()


@pytest.mark.parametrize("name", ["zygote", "engine"])
def test_a_process_killed_during_the_start_is_replaced(start: Start, slow_origin: SlowOrigin, name: str) -> None:
    serving = start("--model", slow_origin.url)
    pid = serving.child(name)
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    assert serving.complete()["choices"][0]["text"]
    assert serving.stop() == 0


def test_an_engine_that_never_comes_up_ends_the_instance(start: Start, slow_origin: SlowOrigin) -> None:
    """As where the container's memory is too small for the imports: the kernel kills each zygote in turn."""
    serving = start("--model", slow_origin.url)
    killed: set[int] = set()
    while serving.process.poll() is None:
        for pid, name in serving.children().items():
            if name == "zygote" and pid not in killed:
                killed.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    assert serving.wait_gone() == 1
    assert len(killed) >= 4
    (said,) = [line for line in serving.output().splitlines() if line.startswith("medusa: ")]
    assert "memory" in said
    assert "Engine.Failed" in said


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.4, 0.8, 1.6])
def test_sigterm_in_every_phase_of_the_start(start: Start, slow_origin: SlowOrigin, delay_s: float) -> None:
    serving = start("--model", slow_origin.url)
    if delay_s:
        assert serving.port
        time.sleep(delay_s)
    assert serving.stop() in (0, -signal.SIGTERM, 143)
