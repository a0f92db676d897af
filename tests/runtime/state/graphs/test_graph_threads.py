"""Graphs that several threads build, on the fake driver."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import DeviceError
from medusa_runtime.state.graphs import Blueprints, CudaDriver, GraphRestorer, MemoryRange, RangeKind, place
from medusa_runtime.state.graphs.blueprint import GraphBlueprint, KernelRecord, Node

from benchmarks.graph_restore import BASE, blueprints

COUNT = 9
KEYS = [f"decode-{number}" for number in range(COUNT)]
INSTANTIATE, LAUNCH, ILLEGAL_ADDRESS = "cuGraphInstantiateWithParams", "cuGraphLaunch", 700


class WatchedDriver(CudaDriver):
    """Runs ``before[function]`` before each call of it, and does not call it if that returns an error."""

    def __init__(self, file: str) -> None:
        super().__init__(file)
        self.before: dict[str, Callable[[], int | None]] = {}
        self.call("cuInit", 0)
        self.context = self.handle("cuDevicePrimaryCtxRetain", 0)
        self.call("cuCtxSetCurrent", self.context)
        self.stream = self.handle("cuStreamCreate", 0)

    def result(self, function: str, *arguments: Any) -> int:
        before = getattr(self, "before", {}).get(function)
        return (before() if before is not None else None) or super().result(function, *arguments)


@pytest.fixture
def driver(fake_cuda: Path) -> WatchedDriver:
    return WatchedDriver(str(fake_cuda))


@contextmanager
def restorer(driver: WatchedDriver, made: Blueprints, **options: Any) -> Iterator[GraphRestorer]:
    """Yield a restorer, and see that it leaves no thread."""
    before = set(threading.enumerate())
    with place(driver, made.ranges) as placement:
        opened = GraphRestorer(driver, made, stream=driver.stream, fingerprint={}, placement=placement, **options)
        with opened.restored:
            yield opened
    for thread in set(threading.enumerate()) - before:
        thread.join(5)  # one that has loaded an image may be about to end
        assert not thread.is_alive(), thread.name


def test_several_threads_build_graphs_at_the_same_time(driver: WatchedDriver) -> None:
    together, seen = threading.Barrier(GraphRestorer.builders), list[tuple[str, int]]()

    def before() -> None:
        seen.append((threading.current_thread().name, driver.current_context()))
        together.wait(10)

    driver.before[INSTANTIATE] = before
    with restorer(driver, blueprints(COUNT, 30, 2)) as one:
        one.build(KEYS)
        assert sorted(one.restored.graphs) == KEYS
        assert one.restored.reasons == {}
        one.build(KEYS)
    assert len(seen) == COUNT, "each graph is built once"
    assert {context for _, context in seen} == {driver.context}
    assert len({name for name, _ in seen}) == GraphRestorer.builders


@pytest.mark.parametrize("builders", [1, 2, 4])
def test_a_graph_that_fails_leaves_the_others(
    driver: WatchedDriver, monkeypatch: pytest.MonkeyPatch, builders: int
) -> None:
    monkeypatch.setattr(GraphRestorer, "builders", builders)
    made = blueprints(COUNT, 30, 2)
    failing = made.graphs[4]
    large = (failing.nodes[0]._replace(shared_bytes=64 << 10), *failing.nodes[1:])
    made = replace(made, graphs=(*made.graphs[:4], replace(failing, nodes=large), *made.graphs[5:]))
    with restorer(driver, made) as one:
        one.build([*KEYS, "decode-absent"])
        assert sorted(one.restored.graphs) == [key for key in KEYS if key != failing.key]
        assert sorted(one.restored.reasons) == [failing.key, "decode-absent"]
        assert str(one.restored.reasons[failing.key]).startswith("driver-call: cuGraphAddKernelNode_v2 failed")


def empty_graphs() -> Blueprints:
    """Return graphs of one node that does nothing, and so can be replayed."""
    nodes = (Node(5, 0, -1, (0, 0, 0), (0, 0, 0), 0, 0, 0),)
    ranges = (MemoryRange("pool", RangeKind.SLAB, BASE, 2 << 20),)
    return Blueprints(ranges=ranges, graphs=tuple(GraphBlueprint(key, nodes, (), b"") for key in KEYS))


def test_the_ends_are_checked_while_others_are_built(driver: WatchedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, built, thread = threading.Event(), list[bool](), threading.local()
    build = GraphRestorer._build_in_thread

    def build_in_thread(self: GraphRestorer, key: str, *arguments: Any) -> None:
        thread.key = key
        build(self, key, *arguments)

    def before() -> None:
        if thread.key not in (KEYS[0], KEYS[-1]):
            assert launched.wait(10)
        built.append(launched.is_set())

    driver.before = {INSTANTIATE: before, LAUNCH: launched.set}
    monkeypatch.setattr(GraphRestorer, "_build_in_thread", build_in_thread)
    with restorer(driver, empty_graphs()) as one:
        assert one.restore(KEYS, "ends") is None
        assert sorted(one.restored.graphs) == KEYS
    assert built.count(True) == COUNT - 2


def test_an_end_that_fails_is_replaced_by_the_next(driver: WatchedDriver) -> None:
    """Then the checks begin when all graphs are built, of those that are."""
    made, launches = empty_graphs(), list[int]()
    driver.before[LAUNCH] = lambda: launches.append(len(one.restored.graphs))
    with restorer(driver, replace(made, graphs=made.graphs[1:])) as one:
        assert one.restore(KEYS, "ends") is None
        assert sorted(one.restored.graphs) == KEYS[1:]
        assert list(one.restored.reasons) == KEYS[:1]
    assert launches == [COUNT - 1] * 4, "two graphs, twice each"


@pytest.mark.parametrize("validate", ["ends", "all"])
def test_a_context_that_breaks_in_a_check_leaves_nothing_running(driver: WatchedDriver, validate: str) -> None:
    driver.before = {INSTANTIATE: lambda: time.sleep(0.01), LAUNCH: lambda: ILLEGAL_ADDRESS}
    with restorer(driver, empty_graphs()) as one, pytest.raises(DeviceError, match="broke the context"):
        one.restore(KEYS, validate)


def test_images_that_nobody_waits_for_are_not_loaded(driver: WatchedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start gives a bundle up if it finds too little memory for the graphs."""
    loads, closing, begun = list[str](), threading.Event(), threading.Semaphore(0)
    waits = Future.exception

    def before() -> None:
        loads.append(threading.current_thread().name)
        begun.release()
        assert closing.wait(10)

    def exception(future: Future[int], timeout: float | None = None) -> BaseException | None:
        closing.set()
        return waits(future, timeout)

    driver.before["cuLibraryLoadData"] = before
    monkeypatch.setattr(Future, "exception", exception)
    with restorer(driver, blueprints(COUNT, 30, 20)) as one:
        one.begin_loading(KEYS)
        for _ in range(4):
            assert begun.acquire(timeout=10)
    assert len(loads) == len(set(loads)) == 4, "one in each thread"


def test_no_graph_is_built_beside_the_capture_of_a_layer(driver: WatchedDriver) -> None:
    """The last graph has a kernel without an image, so a layer is captured while others are being built."""
    under_way, beside = list[str](), list[int]()

    def before() -> None:
        under_way.append(name := threading.current_thread().name)
        time.sleep(0.05)
        under_way.remove(name)

    def trigger(key: str) -> int:
        beside.append(len(under_way))
        return driver.handle("cuGraphCreate", 0)

    driver.before[INSTANTIATE] = before
    made = empty_graphs()
    node = Node(0, 0, 0, (1, 1, 1), (32, 1, 1), 0, 0, 0)
    last = GraphBlueprint("triggered", (node,), (), b"")
    made = replace(
        made, kernels=(KernelRecord("unknown", "", (), ()),), attribute_sets=((),), graphs=(*made.graphs, last)
    )
    with restorer(driver, made, trigger=trigger) as one:
        one.build([*KEYS, "triggered"])
        assert sorted(one.restored.graphs) == KEYS
        assert str(one.restored.reasons["triggered"]).startswith("kernel-missing: unknown is in no saved image")
    assert beside == [0]
