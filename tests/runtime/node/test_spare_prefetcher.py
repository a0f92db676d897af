"""Memory that an agent makes ready for the next model: a prefetcher that waits, with a region of pages."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.region.reader import Region
from process_tree import alive, descendants
from waiting import until

pytestmark = pytest.mark.forked

Start = Callable[..., Any]
Put = Callable[..., str]
MB = 1 << 20


def ready_bytes(node: Any) -> int:
    with closing(node.client()) as client:
        return int(client.status()["ready_bytes"])


def spare_of(node: Any) -> int:
    """Wait for the spare prefetcher to be ready, and return its process."""
    until(lambda: ready_bytes(node) > 0)
    return next(pid for pid, name in descendants(node.process.pid).items() if name == "spare")


def check(region: Region, name: str) -> None:
    for tensor, entry in region.wait_index(20).tensors.items():
        region.wait_tensor(tensor, 20)
        expected = bytes([int(tensor.split(".")[2]) + len(name)])
        assert bytes(region.shard(entry.shard)[entry.start : entry.stop]) == expected * (entry.stop - entry.start)


@pytest.mark.parametrize("size_mb", [1, 24])
def test_the_next_model_is_fetched_by_the_process_that_waits(start_node: Start, put_model: Put, size_mb: int) -> None:
    node = start_node("--ready-memory", "8Mi")
    spare = spare_of(node)
    url = put_model("model", size_mb * MB)
    with closing(node.client()) as client:
        region = client.region(url)
        check(region, "model")
        assert ready_bytes(node) == 0
        until(lambda: not alive(spare))  # it has ended with the fetch
        held = client.status()["regions"][0]
        assert size_mb * MB <= held["memory_bytes"] < (size_mb + 2) * MB
        assert os.fstat(region.fd).st_size < (size_mb + 5) * MB
        region.close()
    assert spare_of(node) != spare


def test_the_process_that_waits_shares_no_memory_that_it_will_write_to(start_node: Start) -> None:
    """Else the beginning of a fetch is a fault and a copy for each page of its objects."""
    shared_kb = writable_kb = 0
    writable = False
    for line in Path(f"/proc/{spare_of(start_node('--ready-memory', '8Mi'))}/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name:
            writable = values[0] == "rw-p"
        elif writable:
            writable_kb += int(values[0]) if name == "Rss:" else 0
            shared_kb += int(values[0]) if name == "Shared_Dirty:" else 0
    assert writable_kb > 4 << 10
    assert shared_kb < writable_kb / 10


def test_a_spare_that_has_died_costs_nothing_but_itself(start_node: Start, put_model: Put) -> None:
    node = start_node("--ready-memory", "8Mi")
    spare = spare_of(node)
    os.kill(spare, signal.SIGKILL)
    until(lambda: not alive(spare))
    url = put_model("model", 4 * MB)
    with closing(node.client()) as client:
        region = client.region(url)
        check(region, "model")
        region.close()


def test_a_spare_gives_way_to_models(start_node: Start, put_model: Put) -> None:
    node = start_node("--ready-memory", "8Mi", "--memory-budget", "40Mi")
    spare_of(node)
    with closing(node.client()) as first, closing(node.client()) as second:
        check(first.region(put_model("first", 16 * MB)), "first")
        spare_of(node)
        until(lambda: ready_bytes(node) > 0)
        check(second.region(put_model("second", 16 * MB)), "second")
        assert second.status()["used_bytes"] > 32 * MB
        time.sleep(3.0)  # longer than after a fetch that leaves room
        assert ready_bytes(node) == 0


def test_no_memory_is_made_ready_unless_it_is_asked_for(start_node: Start) -> None:
    node = start_node()
    assert ready_bytes(node) == 0
    assert "spare" not in descendants(node.process.pid).values()


@pytest.mark.parametrize("name", ["spare", "torch-zygote"])
def test_no_process_that_stays_keeps_the_memory_of_a_region_that_was_dropped(
    start_node: Start, put_model: Put, name: str
) -> None:
    node = start_node("--ready-memory", "1Mi", "--prewarm", "torch=1")
    node.wait_warm()
    url = put_model("model", MB)
    with closing(node.client()) as client, closing(client.region(url)) as region:
        check(region, "model")
        inode = os.fstat(region.fd).st_ino
    spare_of(node)  # it was forked by an agent that has the region
    if name == "torch-zygote":
        zygote = next(pid for pid, found in node.children().items() if found == name)
        os.kill(zygote, signal.SIGKILL)
        until(lambda: not alive(zygote))
        node.wait_warm()
    with closing(node.client()) as client:
        client.drop(url)
    until(lambda: not any(maps(pid, inode) for pid in [node.process.pid, *node.children()]))


def maps(pid: int, inode: int) -> bool:
    try:
        return any(line.split()[4] == str(inode) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    except OSError:
        return False
