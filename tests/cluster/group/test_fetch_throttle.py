"""How much of a worker's link the layers get that it does not need yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from medusa_cluster.group.fetch_throttle import BUSY_SHARE, PROMPT_SHARE, FetchThrottle
from medusa_runtime.config import Settings
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.models.layer_range import LayerRange
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline
from safetensors.torch import save_file

from benchmarks.origin import Origin, Variant


class Worker:
    loaded = False


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def throttle(worker: Worker) -> Iterator[FetchThrottle]:
    region = Region.create()
    made = FetchThrottle(region, lambda: worker.loaded, full=True)
    yield made
    made.release()
    end_throttles()
    region.close()


def end_throttles() -> None:
    for thread in threading.enumerate():
        if thread.name == "group-throttle":
            thread.join(10)


def test_the_layers_of_others_wait_for_the_groups_own(throttle: FetchThrottle, worker: Worker) -> None:
    now = time.monotonic()
    assert throttle.share(now) == 0
    worker.loaded = True
    assert throttle.share(now) == 0  # others still load theirs, from the same store
    throttle.group_loaded = True
    assert throttle.share(now) == BUSY_SHARE  # requests may come at once
    assert throttle.share(now + 60) == 1


def test_a_group_that_does_not_come_is_not_waited_for(throttle: FetchThrottle, worker: Worker) -> None:
    worker.loaded = True
    now = time.monotonic()
    assert throttle.share(now) == 0
    assert throttle.share(now + 0.9) == 0
    assert throttle.share(now + 5) > 0


def test_hidden_states_of_prompts_get_most_of_the_link(throttle: FetchThrottle, worker: Worker) -> None:
    worker.loaded = throttle.group_loaded = True
    throttle.note_step(prompts=True)
    throttle.note_step()  # a step of one token each, among those that have prompts
    now = time.monotonic()
    assert throttle.share(now) == PROMPT_SHARE < 0.5
    assert throttle.share(now + 5) == BUSY_SHARE
    assert throttle.share(now + 60) == 1


def test_a_workers_own_layers_come_though_the_fetch_began_without_them(tmp_path: Path) -> None:
    """All of the fetch was held back, and the worker waited for ever."""
    (tmp_path / "served/m").mkdir(parents=True)
    tensors = {f"layers.{number}.w": torch.zeros(2 << 20, dtype=torch.uint8) for number in range(8)}
    save_file(tensors, tmp_path / "served/m/model.safetensors")
    region = Region.create()
    region.pace(0.0, 3600.0)
    with Origin(tmp_path / "served", tmp_path / "scratch", Variant("plain"), builtin=True) as origin:
        arguments = {"settings": Settings(connections=2), "timeline": Timeline.create("test")}
        fetch = threading.Thread(target=prefetch, args=(region, f"{origin.url}/m"), kwargs=arguments)
        fetch.start()
        region.wait_index()
        made = FetchThrottle(region, lambda: False, full=True, layers=LayerRange(5, 7, 8))
        try:
            region.wait_tensor("layers.5.w", timeout_s=60)
            region.wait_tensor("layers.6.w", timeout_s=60)
            assert not region.has("layers.0.w")
        finally:
            made.release()
            fetch.join(60)
            end_throttles()
    assert region.has("layers.0.w")
    region.close()
