"""The fake driver refuses the calls that CUDA's documentation forbids."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_uint64
from pathlib import Path

import pytest
from medusa_runtime.state.graphs import CudaDriver
from medusa_runtime.state.graphs.driver import RELAXED_CAPTURE

NOT_INITIALIZED, INVALID_CONTEXT, INVALID_HANDLE = 3, 201, 400
UNSUPPORTED, INVALIDATED, IMPLICIT, WRONG_THREAD = 900, 901, 906, 908
GLOBAL, THREAD_LOCAL = 0, 1
BLOCKING, NON_BLOCKING = 0, 1


class Fake(CudaDriver):
    def __init__(self, file: str) -> None:
        super().__init__(file)
        self.call("cuInit", 0)
        self.context = self.handle("cuDevicePrimaryCtxRetain", 0)
        self.call("cuCtxSetCurrent", self.context)

    def allocate(self) -> int:
        return int(ctypes.CDLL(self.file).cuMemAlloc_v2(byref(c_uint64()), ctypes.c_size_t(4096)))

    def end(self, stream: int) -> int:
        made = c_uint64()
        result = int(ctypes.CDLL(self.file).cuStreamEndCapture(ctypes.c_void_p(stream), byref(made)))
        assert bool(made.value) == (result == 0)
        return result

    @contextmanager
    def capturing(self, mode: int, flags: int = NON_BLOCKING, ends: int = 0) -> Iterator[int]:
        stream = self.handle("cuStreamCreate", flags)
        assert ctypes.CDLL(self.file).cuStreamBeginCapture_v2(ctypes.c_void_p(stream), mode) == 0
        yield stream
        assert self.end(stream) == ends


@pytest.fixture
def driver(fake_cuda: Path) -> Fake:
    return Fake(str(fake_cuda))


def elsewhere(driver: Fake, work: Callable[[], int], *, relaxed: bool = False) -> int:
    """Return what ``work`` returns in another thread."""
    found: list[int] = []

    def run() -> None:
        driver.use_in_thread(driver.context) if relaxed else driver.call("cuCtxSetCurrent", driver.context)
        found.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_a_capture_forbids_what_is_unsafe_where_its_mode_says(driver: Fake) -> None:
    for mode, other in ((GLOBAL, UNSUPPORTED), (THREAD_LOCAL, 0), (RELAXED_CAPTURE, 0)):
        with driver.capturing(mode, ends=INVALIDATED if other else 0):
            assert elsewhere(driver, driver.allocate) == other
        own = 0 if mode == RELAXED_CAPTURE else UNSUPPORTED
        with driver.capturing(mode, ends=INVALIDATED if own else 0):
            assert driver.allocate() == own
        with driver.capturing(mode):
            assert elsewhere(driver, driver.allocate, relaxed=True) == 0


def test_a_capture_forbids_what_waits_for_its_stream(driver: Fake) -> None:
    with driver.capturing(THREAD_LOCAL, ends=INVALIDATED):
        assert elsewhere(driver, lambda: driver.result("cuCtxSynchronize"), relaxed=True) == UNSUPPORTED
    with driver.capturing(THREAD_LOCAL, ends=INVALIDATED) as stream:
        assert driver.result("cuStreamSynchronize", stream) == UNSUPPORTED
    with driver.capturing(THREAD_LOCAL):
        assert elsewhere(driver, lambda: driver.result("cuStreamSynchronize", None)) == 0
    with driver.capturing(THREAD_LOCAL, BLOCKING, ends=INVALIDATED):
        assert elsewhere(driver, lambda: driver.result("cuStreamSynchronize", None)) == IMPLICIT


def test_a_capture_ends_in_its_thread(driver: Fake) -> None:
    with driver.capturing(THREAD_LOCAL) as stream:
        assert elsewhere(driver, lambda: driver.end(stream)) == WRONG_THREAD


def test_calls_need_the_threads_context_and_its_process(driver: Fake) -> None:
    driver.call("cuCtxSetCurrent", None)
    assert driver.allocate() == INVALID_CONTEXT
    assert driver.result("cuMemGetInfo_v2", byref(c_uint64()), byref(c_uint64())) == INVALID_CONTEXT
    driver.call("cuCtxSetCurrent", driver.context)
    assert driver.allocate() == 0
    if not (child := os.fork()):
        os._exit(driver.allocate())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == NOT_INITIALIZED


def test_what_is_launched_runs_when_something_waits_for_it(driver: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    library, memory = ctypes.CDLL(driver.file), c_uint64()
    assert library.cuMemAlloc_v2(byref(memory), ctypes.c_size_t(4096)) == 0
    for late, flags, seen in ((False, NON_BLOCKING, 7), (True, BLOCKING, 7), (True, NON_BLOCKING, 0)):
        monkeypatch.setenv("FAKE_CUDA_LATE", "1") if late else monkeypatch.delenv("FAKE_CUDA_LATE", raising=False)
        stream = driver.handle("cuStreamCreate", flags)
        driver.fill(memory.value, 0, 4)
        library.cuMemsetD32Async(memory, 7, ctypes.c_size_t(1), ctypes.c_void_p(stream))
        assert driver.read(memory.value, 4)[0] == seen, "a copy waits for blocking streams alone"
        driver.call("cuStreamSynchronize", stream)
        assert driver.read(memory.value, 4)[0] == 7


def test_nodes_end_with_their_graph(driver: Fake) -> None:
    graph = driver.handle("cuGraphCreate", 0)
    node = driver.handle("cuGraphAddEmptyNode", graph, None, 0)
    assert driver.result("cuGraphNodeGetType", node, byref(c_int())) == 0
    driver.call("cuGraphDestroy", graph)
    assert driver.result("cuGraphNodeGetType", node, byref(c_int())) == INVALID_HANDLE
    assert driver.result("cuGraphDestroy", graph) == INVALID_HANDLE
