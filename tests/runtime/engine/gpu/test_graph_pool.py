"""torch's pool at a chosen address, on the fake driver: where its segments are, and what torch may ask for when."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from medusa_runtime.engine.gpu.graph_pool import GraphPool, open_pool
from medusa_runtime.errors import DeviceError
from medusa_runtime.state.graphs import CudaDriver, RangeKind

sys.path.insert(0, str(Path(__file__).parent))
from fake_allocator import FakeAllocator

BASE, APART = 0x2800_0000_0000, 1 << 42
MB = 1 << 20
STREAM_CAPTURE_UNSUPPORTED, STREAM_CAPTURE_INVALIDATED = 900, 901
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def driver(fake_cuda: Path) -> CudaDriver:
    driver = CudaDriver(str(fake_cuda))
    driver.call("cuInit", 0)
    driver.call("cuCtxSetCurrent", driver.handle("cuDevicePrimaryCtxRetain", 0))
    return driver


@pytest.fixture
def opened(driver: CudaDriver, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Open a pool, and return it with torch's ends of it: ``malloc(bytes)`` and ``free(address, bytes)``."""
    made: list[FakeAllocator] = []
    pools = SimpleNamespace(made=made)
    monkeypatch.setattr(torch.cuda.memory, "CUDAPluggableAllocator", lambda *names: FakeAllocator(*names))
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: pools.made.append(allocator) or SimpleNamespace())

    def opened(base: int) -> Any:
        pool = GraphPool(driver, base)
        allocator = pools.made[-1]

        def malloc(size: int, device: int = 0) -> int:
            return allocator.malloc(size, device, None) or 0

        return SimpleNamespace(pool=pool, malloc=malloc, free=lambda at, size: allocator.free(at, size, 0, None))

    return opened


def used(one: Any) -> int:
    return int(one.pool.memory_range.size)


def test_segments_have_the_same_places_in_any_pool(driver: CudaDriver, opened: Open) -> None:
    """In the order in which torch asks for them, whatever it gives back meanwhile."""
    places = []
    for base in (BASE, BASE + APART):
        one = opened(base)
        found = [one.malloc(size) for size in (2 * MB, 20 * MB, 5 * MB - 3)]
        one.free(found[0], 2 * MB)
        one.free(found[2], 5 * MB - 3)
        found += [one.malloc(size) for size in (20 * MB, 5 * MB, 2 * MB, 1)]
        places.append([at - base for at in found])
        assert one.pool.memory_range == ("graph pool", RangeKind.SLAB, base, 50 * MB)
    assert places[0] == [mb * MB for mb in (0, 2, 22, 28, 22, 0, 48)]
    assert places[1] == places[0]


def test_what_torch_gives_back_stays_mapped(driver: CudaDriver, opened: Open) -> None:
    """A graph may have its address, and the materialized pool is one range without holes."""
    one = opened(BASE + 2 * APART)
    first, second = one.malloc(2 * MB), one.malloc(2 * MB)
    driver.write(first + 2 * MB - 8, b"together")
    driver.write(second, b"!")
    one.free(first, 2 * MB)
    assert driver.read(second - 8, 9) == b"together!", "one copy across both"
    assert used(one) == 4 * MB


def test_torch_asks_while_it_captures(driver: CudaDriver, opened: Open) -> None:
    one = opened(BASE + 3 * APART)
    stream, graph, memory = driver.handle("cuStreamCreate", 0), ctypes.c_uint64(), ctypes.c_uint64()
    library = ctypes.CDLL(driver.file)
    assert library.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), 1) == 0
    assert one.malloc(2 * MB) == BASE + 3 * APART
    size = ctypes.c_size_t(MB)
    assert library.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph)) == 0
    assert library.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), 1) == 0
    assert library.cuMemAlloc_v2(ctypes.byref(memory), size) == STREAM_CAPTURE_UNSUPPORTED, "nothing else may"
    assert library.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph)) == STREAM_CAPTURE_INVALIDATED
    assert library.cuMemAlloc_v2(ctypes.byref(memory), size) == 0
    assert library.cuMemFree_v2(memory) == 0


def test_what_cannot_be_given_is_torchs_out_of_memory(
    driver: CudaDriver, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = opened(BASE + 4 * APART)
    assert one.malloc(2 << 40) == 0, "more than there are addresses"
    assert one.malloc(0) == 0
    assert one.malloc(MB, device=1) == 0
    monkeypatch.setenv("FAKE_CUDA_MEMORY", "0")
    assert one.malloc(MB) == 0
    monkeypatch.undo()
    assert used(one) == 0
    assert one.malloc(MB) == BASE + 4 * APART, "nothing is left of the attempts"


def test_a_thread_without_a_context(driver: CudaDriver, opened: Open) -> None:
    one = opened(BASE + 5 * APART)
    context = driver.current_context()
    driver.call("cuCtxSetCurrent", None)
    assert one.malloc(MB) == BASE + 5 * APART
    assert driver.current_context() == context


def test_a_taken_address_is_said_and_no_failure(
    driver: CudaDriver, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened(BASE + 6 * APART)
    with caplog.at_level(logging.WARNING):
        second = opened(BASE + 6 * APART)
    start = second.pool.memory_range.address
    assert f"{BASE + 6 * APART:#x} is taken: graphs are captured with their pool at {start:#x} instead" in caplog.text
    assert first.malloc(MB) == BASE + 6 * APART
    assert second.malloc(MB) == start


def test_what_refuses_a_pool_is_logged(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*names: str) -> Any:
        raise RuntimeError("cudaMallocAsync does not yet support pools")

    monkeypatch.setattr(torch.cuda.memory, "CUDAPluggableAllocator", refused)
    with caplog.at_level(logging.WARNING):
        assert open_pool(driver, BASE + 7 * APART) is None
    assert "captured in memory at addresses that torch chooses: cudaMallocAsync does not" in caplog.text
    monkeypatch.delattr(torch.cuda.memory, "CUDAPluggableAllocator")  # a torch that calls it otherwise
    assert open_pool(driver, BASE + 7 * APART) is None
    monkeypatch.setenv("CC", "/nonexistent/cc")
    with pytest.raises(DeviceError, match=r"graph_pool.c cannot be compiled .*; install a C compiler, or set CC"):
        GraphPool(driver, BASE + 8 * APART)
