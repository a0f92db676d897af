"""Device memory at chosen addresses, on the fake driver, whose device is this process's own memory."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from medusa_runtime.engine.gpu.graph_memory import unnamed_ranges
from medusa_runtime.engine.gpu.placed_memory import PlacedMemory
from medusa_runtime.errors import DeviceError, EngineError
from medusa_runtime.state.graphs import CudaDriver, MemoryRange, RangeKind, place

SOURCES = Path(__file__).parents[2] / "state/graphs/fakecuda"
HOST = torch.device("cpu")
BASE, FREE_GAP = 0x2000_0000_0000, 1 << 40


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> CudaDriver:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("driver") / "libcuda-placed.so.1"
    files = sorted(map(str, SOURCES.glob("*.c")))
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, *files, "-lm"], check=True, timeout=240)
    driver = CudaDriver(str(library))
    driver.call("cuInit", 0)
    driver.call("cuCtxSetCurrent", driver.handle("cuDevicePrimaryCtxRetain", 0))
    return driver


def test_ranges_lie_behind_each_other_from_the_base_on(driver: CudaDriver) -> None:
    memory = PlacedMemory(driver, HOST, BASE)
    weights, cache = memory("weights", 3 << 20), memory("KV cache", 1000)
    assert weights.data_ptr() == BASE
    assert cache.data_ptr() > BASE + (3 << 20)
    assert {name: one.address for name, one in memory.ranges.items()} == {
        "weights": weights.data_ptr(),
        "KV cache": cache.data_ptr(),
    }
    weights.fill_(5)
    cache.fill_(6)
    assert (weights == 5).all()
    assert weights.nbytes == 3 << 20
    assert memory.ranges["KV cache"].size == 1000


def test_another_process_has_the_same_addresses(driver: CudaDriver) -> None:
    first = PlacedMemory(driver, HOST, BASE + FREE_GAP)
    places = [first(name, size).data_ptr() for name, size in (("weights", 7 << 20), ("KV cache", 5 << 20))]
    second = PlacedMemory(driver, HOST, BASE + 2 * FREE_GAP)
    others = [second(name, size).data_ptr() for name, size in (("weights", 7 << 20), ("KV cache", 5 << 20))]
    assert [place + FREE_GAP for place in places] == others


def test_a_taken_address_is_no_failure(driver: CudaDriver) -> None:
    first = PlacedMemory(driver, HOST, BASE + 3 * FREE_GAP)
    taken = first("weights", 1 << 20)
    second = PlacedMemory(driver, HOST, BASE + 3 * FREE_GAP)
    elsewhere = second("weights", 1 << 20)
    assert elsewhere.data_ptr() != taken.data_ptr()
    assert second.ranges["weights"].address == elsewhere.data_ptr()
    elsewhere.fill_(9)
    taken.fill_(1)
    assert (elsewhere == 9).all()


def test_a_recorded_address_to_which_another_range_was_moved(driver: CudaDriver) -> None:
    taken = PlacedMemory(driver, HOST, BASE + 7 * FREE_GAP)("weights", 1 << 20).data_ptr()
    first = MemoryRange("first", RangeKind.NAMED, taken, 1 << 20)
    moved = []
    for _ in range(2):
        with place(driver, [first]) as placement:
            moved.append(placement.addresses["first"])
    second = MemoryRange("second", RangeKind.NAMED, 2 * moved[1] - moved[0], 1 << 20)
    with place(driver, [first, second]) as placement:
        assert placement.addresses["first"] == second.address, "the fake driver moves in equal steps"
        assert placement.addresses["second"] != second.address


def test_too_little_memory_is_told(driver: CudaDriver) -> None:
    memory = PlacedMemory(driver, HOST, BASE + 4 * FREE_GAP)
    with pytest.raises(DeviceError, match=r"the weights cannot be placed: .*MiB.*use a larger GPU"):
        memory("weights", 1 << 50)


def test_a_thread_that_never_used_the_device(driver: CudaDriver) -> None:
    memory = PlacedMemory(driver, HOST, BASE + 6 * FREE_GAP)
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(memory("weights", 100)))
    thread.start()
    thread.join()
    assert made[0].nbytes == 100


def test_names_are_used_once(driver: CudaDriver) -> None:
    memory = PlacedMemory(driver, HOST, BASE + 5 * FREE_GAP)
    memory("weights", 10)
    with pytest.raises(DeviceError, match="expected to map weights once"):
        memory("weights", 10)


def test_segments_that_grow_are_refused() -> None:
    """Nothing in the graphs would say that such a segment has another size at a restore."""
    segment = {"address": 1 << 40, "total_size": 2 << 20, "segment_pool_id": (0, 1), "blocks": []}
    (pool,) = unnamed_ranges([], [{**segment, "is_expandable": False}], (0, 1))
    assert (pool.address, pool.size) == (1 << 40, 2 << 20)
    with pytest.raises(EngineError, match="take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"):
        unnamed_ranges([], [{**segment, "is_expandable": True}], (0, 1))
