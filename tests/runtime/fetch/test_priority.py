"""What a forward waits for comes first, what is late is asked for twice, and background loads give way."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.checkpoint.order import layers_first
from medusa_runtime.config import Settings
from medusa_runtime.fetch.in_flight import InFlightRanges, Span
from medusa_runtime.fetch.load_priority import LoadPriority, is_interactive_load_running
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.fetch.schedule import Schedule
from medusa_runtime.region.demand import create_demand_memfd, demand, pace, promote
from medusa_runtime.region.layout import RING_OFFSET, RING_WORDS
from medusa_runtime.region.reader import Region
from medusa_runtime.storage.retry import RetryPolicy
from medusa_runtime.timeline import Timeline

MIB = 1 << 20
TENSORS = {f"layers.{number}.w": ("U8", [2 * MIB], os.urandom(2 * MIB)) for number in range(12)}
LAST = "layers.11.w"


@pytest.fixture
def served(origin: Any, safetensors_file: Callable[..., bytes]) -> Any:
    origin.put("/m/model.safetensors", safetensors_file(TENSORS))
    return origin


def fetching(region: Region, url: str, timeline: Timeline | None = None, **options: Any) -> threading.Thread:
    def run() -> None:
        with closing(Timeline.create("test")) as own:
            prefetch(region, url, settings=Settings(**options), timeline=timeline or own)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def check(region: Region) -> None:
    index = region.wait_index()
    for name, (_, _, data) in TENSORS.items():
        entry = index.tensors[name]
        assert region.shard(entry.shard)[entry.start : entry.stop] == data, name


def test_what_is_asked_for_is_fetched_first(served: Any, region: Region) -> None:
    served.bytes_per_s = 10e6
    thread = fetching(region, served.url + "/m", connections=1)
    region.wait_index()
    region.demand([LAST])
    region.wait_tensor(LAST, timeout_s=120)
    assert region.progress().fetched_bytes < 20 * MIB
    assert not region.has("layers.9.w")
    served.bytes_per_s = None
    thread.join(60)
    check(region)


def test_what_nobody_waits_for_is_held_back_as_long_as_a_reader_says_so(served: Any, region: Region) -> None:
    outside = create_demand_memfd()
    pace(outside, 0.0, 60.0)
    writer = region.writer()
    writer.demand.listen(outside)
    settings = Settings(connections=4, layers="0:3")
    arguments = {"settings": settings, "timeline": Timeline.create("test"), "writer": writer}
    thread = threading.Thread(target=prefetch, args=(region, served.url + "/m"), kwargs=arguments)
    thread.start()
    try:
        for number in range(3):
            region.wait_tensor(f"layers.{number}.w", timeout_s=120)
        time.sleep(0.2)
        assert region.progress().fetched_bytes <= 7 * MIB  # a chunk may have bytes of two layers
        region.demand([LAST])  # a forward waits for it
        region.wait_tensor(LAST, timeout_s=120)
        assert region.progress().fetched_bytes <= 10 * MIB
        pace(outside, 0.5, 0.3)  # and it ends with its reader
        thread.join(120)
        check(region)
    finally:
        pace(outside, 1.0, 60.0)
        thread.join(120)
        os.close(outside)


def test_a_paced_fetch_takes_its_share_of_the_link(served: Any, region: Region) -> None:
    served.bytes_per_s = 80e6
    region.pace(0.25, 60.0)
    thread = fetching(region, served.url + "/m", connections=2, layers="0:6")
    region.wait_index()
    region.wait_tensor("layers.5.w", timeout_s=120)
    began, left_bytes = time.monotonic(), 12 * MIB - max(region.progress().fetched_bytes - 12 * MIB, 0)
    thread.join(60)
    assert time.monotonic() - began > 0.5 * left_bytes / (0.25 * 2 * served.bytes_per_s)
    check(region)


def test_a_range_is_as_long_as_what_comes_soon() -> None:
    """Else all of a slow link's bytes are under way at once, and come in no order."""
    flights = InFlightRanges()
    assert flights.range_bytes(4, 8 * MIB) == 2 * MIB
    flight = flights.begin(Span(0, 1), 50 * MIB)
    flight.advance(10 * MIB)
    flight.began = flights._began = time.monotonic() + 1e6  # just now, however long this test is held up
    assert flights.range_bytes(4, 8 * MIB) == 5 * MIB  # 10 MiB in 50 ms: nothing is known of a shorter time
    flight.began = flights._began = time.monotonic() - 1.0
    assert 0 < flights.range_bytes(4, 8 * MIB) < 0.3 * MIB
    flight.first_s = 0.5  # of a store that answers late a range is longer
    flight.advance(flight.size_bytes)
    flights.end(flight)
    assert flights.range_bytes(4, 8 * MIB) == 8 * MIB


def test_an_answer_that_has_not_begun_is_late_before_one_that_is_slow() -> None:
    flights = InFlightRanges()
    silent, slow = flights.begin(Span(1, 1), 10**9), flights.begin(Span(2, 1), 10**9)
    first = flights.begin(Span(0, 1), 100_000)
    first.began -= 0.01
    first.advance(first.size_bytes)
    slow.advance(1)
    for flight in (silent, slow):
        flight.began -= 100.0  # at most 10 MB a second: a gigabyte takes longer
    assert flights.stragglers() == []  # nothing tells yet how soon an answer begins
    flights.end(first)
    assert flights.stragglers() == [silent], "two that were begun later are answered"
    slow.began -= 100.0
    assert flights.stragglers() == [], "one is no proof"
    assert flights.stragglers(ending=True) == [silent]
    slow.began += 150.0
    silent.hedged = True
    assert flights.stragglers() == []


def test_ranges_that_a_shared_link_slows_are_not_late() -> None:
    flights = InFlightRanges()
    first = flights.begin(Span(0, 1), 8 * MIB)
    first.began -= 0.01
    first.advance(first.size_bytes)
    flights.end(first)  # 840 MB a second, when it was alone
    peers = [flights.begin(Span(number, 1), 8 * MIB) for number in range(1, 17)]
    for peer in peers:
        peer.began -= 0.2
    assert flights.stragglers() == [], "no answer has begun anywhere, so it is no single one's fault"
    assert flights.stragglers(ending=True) == peers, "but then nothing is lost by asking again"
    for peer in peers:
        peer.began -= 2.8
        peer.advance(6 * MIB)
    assert flights.stragglers() == []
    newer = [flights.begin(Span(number, 1), 8 * MIB) for number in range(17, 25)]
    for flight in newer:
        flight.began -= 1.0
        flight.advance(2 * MIB)
    for peer in peers[:2]:
        peer.began -= 6.0
    assert flights.stragglers() == peers[:2], "twice what a range needs now is over"
    assert flights.hedge_budget() == 6
    peers[0].hedged = True
    flights.begin(Span(1, 1), 8 * MIB, is_hedge=True)
    assert flights.hedge_budget() == 5
    peers[1].pause(6.0)
    assert flights.stragglers() == [], "it was suspended for that long"


@pytest.mark.parametrize("number", [0, 5])
def test_a_range_that_stalls_is_asked_for_again(served: Any, region: Region, number: int) -> None:
    """The origin hangs for good in the middle of some ranges; no retry would help before its timeout of a minute."""
    timeline = Timeline.create("test")
    served.faults["/m/model.safetensors"] = [""] * (number + 1) + ["stall"]
    thread = fetching(region, served.url + "/m", timeline, connections=4)
    region.wait_index()
    for name in TENSORS:
        region.demand([name])
        region.wait_tensor(name, timeout_s=120)
    thread.join(120)
    assert not thread.is_alive()
    check(region)
    assert next(stage for stage in timeline.stages() if stage.name == "fetch").detail["hedges"] >= 1
    asked = served.asked("/m/model.safetensors")
    start, stop = asked[number + 1]
    assert any(again == start + (stop - start) // 2 for again, _ in asked), "what had come was asked for again"


@pytest.mark.parametrize("reserved", [False, True])  # with memory made ahead, stores write into the region themselves
def test_what_readers_have_is_not_overwritten_by_the_slower_of_two_requests(
    served: Any, region: Region, *, reserved: bool
) -> None:
    """An origin answers one request well, and the other one with wrong bytes once the first chunks are published."""
    served.faults["/m/model.safetensors"] = ["", "turn"]
    served.bytes_per_s = 4e6
    writer = region.writer()
    if reserved:
        writer.reserve(32 * MIB)
    arguments = {"settings": Settings(connections=2), "timeline": Timeline.create("test"), "writer": writer}
    thread = threading.Thread(target=prefetch, args=(region, served.url + "/m"), kwargs=arguments)
    thread.start()
    index = region.wait_index()
    while len(served.asked("/m/model.safetensors")) < 2:
        time.sleep(0.001)
    (shard,) = index.shards
    chunk = (served.asked("/m/model.safetensors")[1][0] - shard.data_start) // MIB
    name = next(name for name, entry in index.tensors.items() if entry.start <= chunk * MIB < entry.stop)
    region.demand([name])
    while not (region.has(name) or region._present(range(chunk, chunk + 1))):
        time.sleep(0.001)
    served.turned.set()
    thread.join(120)
    assert not thread.is_alive()
    check(region)


@pytest.mark.slow
def test_second_requests_do_not_fill_a_slow_link(served: Any, region: Region) -> None:
    """Over a link that all connections share, each is slower than the last; more of them, or second requests, harm."""
    served.shared_bytes_per_s = 5e6
    thread = fetching(region, served.url + "/m")
    region.wait_index()
    for name in TENSORS:
        region.demand([name])
        region.wait_tensor(name, timeout_s=60)
    thread.join(60)
    check(region)
    assert served.sent_bytes < 1.25 * region.progress().total_bytes


def test_what_came_by_another_request_is_not_waited_for(
    served: Any, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else connections are lost to a store that hangs, and late answers take the bandwidth of others."""
    monkeypatch.setattr("medusa_runtime.storage.http.store.RetryPolicy", partial(RetryPolicy, stall_s=600.0))
    served.faults["/m/model.safetensors"] = [""] * 6 + ["stall"]
    thread = fetching(region, served.url + "/m", connections=1)
    region.wait_index()
    region.demand(list(TENSORS))
    thread.join(100)
    check(region)
    while any(thread.name.startswith("fetch-") for thread in threading.enumerate()):
        time.sleep(0.01)
    assert served.hanging, "the origin was not asked for what it holds back"
    assert not served.gave_up, "somebody waited for an answer that nobody needed"


def test_a_second_request_that_fails_leaves_the_first_alone(served: Any, region: Region) -> None:
    served.faults["/m/model.safetensors"] = [""] * 6 + ["stall", "403"]
    thread = fetching(region, served.url + "/m", connections=1)
    region.wait_index()
    region.demand(list(TENSORS))
    while served.faults["/m/model.safetensors"] and thread.is_alive():
        time.sleep(0.01)
    served.stopping.set()  # the first one's connection breaks, and it goes on where it was
    thread.join(60)
    assert region.progress().error is None
    check(region)


def test_a_background_load_gives_way_and_still_ends(served: Any, region: Region, own_lock: None) -> None:
    assert not is_interactive_load_running()
    with LoadPriority("interactive"):
        assert is_interactive_load_running()
        fetching(region, served.url + "/m", load_priority="background").join(60)
        with LoadPriority("background"):
            assert is_interactive_load_running()
    assert not is_interactive_load_running()
    check(region)


@pytest.fixture
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests load at the same time."""
    (tmp_path / "lock").touch()
    monkeypatch.setattr("medusa_runtime.fetch.load_priority.__file__", str(tmp_path / "lock"))


@pytest.mark.parametrize("by", ["a forward", "somebody"])
def test_a_background_load_has_one_range_at_a_time_unless_it_is_waited_for(
    filling: Callable[..., Any], own_lock: None, by: str
) -> None:
    import torch

    filled = filling({f"{n}": torch.zeros(10) for n in range(6)}).lay_out()
    demand_fd = create_demand_memfd()
    filled.writer.demand.listen(demand_fd)
    taken: list[Any] = []
    with LoadPriority("background") as load:
        schedule = Schedule(filled.writer, load)
        with LoadPriority("interactive"):
            span = schedule.take(1)
            assert span is not None
            schedule.flights.begin(span, 40)
            thread = threading.Thread(target=lambda: taken.append(schedule.take(1)), daemon=True)
            thread.start()
            time.sleep(0.1)
            assert not taken
            if by == "a forward":
                filled.region.demand(["4"])
            else:
                promote(demand_fd)
            thread.join(120)
        assert is_interactive_load_running() == (by == "somebody"), "a load that is waited for is interactive itself"
        assert [span.first for span in taken] == [filled.writer.chunks.of_tensor("4").start if by == "a forward" else 1]
    assert not is_interactive_load_running()
    os.close(demand_fd)


def test_a_fetch_waits_for_memory_to_be_given_back(
    filling: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr("medusa_runtime.fetch.schedule.UNRELEASED_BYTES", 50)
    filled = filling({f"{n}": torch.zeros(10) for n in range(6)}).lay_out()
    schedule = Schedule(filled.writer)
    assert schedule.take(1) is not None
    filled.arrive("0", "1", "2", "3")
    filled.region.release("0")  # 120 bytes are left: more than the limit and the largest tensor
    taken: list[Any] = []
    thread = threading.Thread(target=lambda: taken.append(schedule.take(1)), daemon=True)
    thread.start()
    time.sleep(0.1)
    assert not taken
    filled.region.release("1")
    thread.join(120)
    assert taken


def test_a_tensor_larger_than_that_memory_still_comes(
    filling: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr("medusa_runtime.fetch.schedule.UNRELEASED_BYTES", MIB)
    filled = filling({"small": torch.zeros(MIB // 4), "large": torch.zeros(6 * MIB), "next": torch.zeros(MIB)})
    writer, region = filled.lay_out().writer, filled.region
    schedule = Schedule(writer)
    filled.arrive("small")
    region.release("small")
    while region.fetched_bytes < (1 + 24) * MIB:
        span = schedule.take(1)
        assert span is not None
        for chunk in span.chunks:
            if not writer.present(chunk):
                writer.publish(chunk)
    region.wait_tensor("large", 1)


def test_what_was_given_back_is_fetched_again_however_far_ahead_the_rest_is(
    filling: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr("medusa_runtime.fetch.schedule.UNRELEASED_BYTES", 0)
    filled = filling({f"{n}": torch.zeros(10 + n) for n in range(6)}).lay_out()
    schedule = Schedule(filled.writer)
    spans = [schedule.take(1) for _ in range(6)]
    assert spans[1] is not None
    filled.arrive("0", "2", "3", "4", "5")
    filled.region.release("0")
    schedule.give_back(spans[1])
    again = schedule.take(1)
    assert again is not None
    assert again.first == spans[1].first


@pytest.mark.parametrize("ahead", [100, math.inf])
def test_before_anything_is_freed_a_fetch_may_be_a_limit_ahead(filling: Callable[..., Any], ahead: float) -> None:
    import torch

    filled = filling({f"{n}": torch.zeros(10) for n in range(6)}).lay_out()
    schedule = Schedule(filled.writer, most_ahead=ahead)
    assert schedule.take(1) is not None
    filled.arrive("0", "1", "2")
    taken: list[Any] = []
    thread = threading.Thread(target=lambda: taken.append(schedule.take(1)), daemon=True)
    thread.start()
    thread.join(0.2 if ahead == 100 else 60)
    assert bool(taken) == (ahead == math.inf)
    filled.region.release("0")
    thread.join(60)
    assert taken


def test_one_range_at_a_time_is_large_until_something_else_comes_first(filling: Callable[..., Any]) -> None:
    import torch

    filled = filling({"0": torch.zeros(24 * MIB), "1": torch.zeros(MIB)})
    writer = filled.lay_out().writer
    schedule = Schedule(writer)
    large, small = (schedule.take(2, whole=True) for _ in range(2))
    assert large is not None
    assert small is not None
    assert [span.length * writer.chunks.chunk_bytes for span in (large, small)] == [64 * MIB, 8 * MIB]
    assert not schedule.should_give_back(alone=True)
    assert schedule.large is large

    demand_fd, last = create_demand_memfd(), writer.chunks.count - 1
    writer.demand.listen(demand_fd)
    demand(demand_fd, [small.first])  # it comes next
    assert not schedule.should_give_back(alone=True)
    os.close(demand_fd)
    demand_fd = create_demand_memfd()
    writer.demand.listen(demand_fd)
    demand(demand_fd, [last])
    assert schedule.should_give_back(alone=True)
    os.close(demand_fd)
    schedule.give_back(large)
    assert schedule.take(2, whole=True) == Span(last, 1)
    assert schedule.take(2, whole=True) == Span(large.first, small.length)


@pytest.mark.parametrize("word", [1 << 63, 1 << 32, (1 << 63) | 1 << 20])
def test_a_request_for_no_chunk_of_the_region_is_ignored(filling: Callable[..., Any], word: int) -> None:
    """Readers that are not trusted write these words."""
    import torch

    writer = filling({f"{n}": torch.zeros(10) for n in range(4)}).lay_out().writer
    demand_fd = create_demand_memfd()
    writer.demand.listen(demand_fd)
    os.pwrite(demand_fd, word.to_bytes(8, "little"), RING_OFFSET)
    schedule = Schedule(writer)
    spans = list(islice(iter(lambda: schedule.take(1), None), 20))
    assert [chunk for span in spans for chunk in span.chunks] == writer.pending()
    os.close(demand_fd)


def test_a_workers_layers_are_fetched_first_and_the_others_in_the_background(
    served: Any, region: Region, own_lock: None
) -> None:
    served.bytes_per_s = 20e6
    thread = fetching(region, served.url + "/m", connections=1, layers="8:12")
    region.wait_index()
    region.wait_tensor(LAST)
    assert not region.has("layers.6.w")
    region.wait_tensor("layers.1.w")
    assert not is_interactive_load_running()
    thread.join()
    check(region)


def test_many_connections_take_no_bandwidth_from_a_workers_layers(served: Any, region: Region) -> None:
    served.bytes_per_s = 2e6  # of each connection
    thread = fetching(region, served.url + "/m", connections=12, layers="9:12")
    region.wait_index()
    for number in range(9, 12):
        region.wait_tensor(f"layers.{number}.w")
    assert not any(region.has(f"layers.{number}.w") for number in range(8))
    region.wait_tensor("layers.8.w")
    thread.join()
    check(region)


def test_the_ends_of_a_model_belong_to_its_first_and_last_layers() -> None:
    layers = [f"layers.{number}.w" for number in range(4)]
    untied = ["embed_tokens.weight", *layers, "norm.weight", "lm_head.weight"]
    assert layers_first(untied, 0, 2) == (untied[:3], untied[3:])
    assert layers_first(untied, 1, 3)[0] == layers[1:3]
    assert layers_first(untied, 2, 4)[0] == untied[3:]
    for start, stop in ((0, 2), (1, 3), (2, 4)):
        own, rest = layers_first(untied, start, stop)
        assert layers_first([*own, *rest], start, stop) == (own, rest)  # as in a worker's region
    tied = untied[:-1]
    assert layers_first(tied, 2, 4)[0] == [tied[0], *tied[3:]]


def test_a_reader_that_demands_everything_many_times_costs_no_more_than_once() -> None:
    """Its words stay in the ring, and a fetch looks at them for each range."""
    fd = create_demand_memfd()
    for place in range(RING_WORDS):
        word = ((8192 - place) << 32) | (place + 1)
        os.pwrite(fd, word.to_bytes(8, "little"), RING_OFFSET + 8 * place)
    with closing(Region.create()) as region, closing(region.writer()) as writer:
        writer.demand.listen(fd)
        assert writer.demand.demanded(8192) == [range(8192)]
        os.pwrite(fd, bytes(8 * RING_WORDS), RING_OFFSET)
        for place, (first, size) in enumerate([(7, 2), (1, 3), (2, 4), (8, 9)]):
            os.pwrite(fd, ((size << 32) | (first + 1)).to_bytes(8, "little"), RING_OFFSET + 8 * place)
        assert writer.demand.demanded(10) == [range(1, 4), range(4, 6), range(7, 9), range(9, 10)]
    os.close(fd)
