"""How much of a worker's link the layers get that it does not need yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from medusa_cluster.group.fetch_throttle import BUSY_SHARE, PROMPT_SHARE, FetchThrottle
from medusa_runtime.region.reader import Region


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
    for thread in threading.enumerate():
        if thread.name == "group-throttle":
            thread.join(10)
    region.close()


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
