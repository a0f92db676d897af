"""The probe on the fake driver of the tests: a dry run, in which every step of the probe itself is real."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from medusa_runtime.engine.gpu.graph_pool import OTHER_POOL_BASE, POOL_BASE, open_pool
from medusa_runtime.engine.gpu.placed_memory import BASE, PlacedMemory
from medusa_runtime.state.graphs import ImageStore, MemoryRange

from benchmarks.gpu.probing.ground import INPUTS, OUTPUTS, fixed_bytes

TESTS = Path(__file__).parents[3] / "tests/runtime/state/graphs"
_TORCH = TESTS.parents[1] / "engine/gpu"  # what stands in for torch's end of an allocator
_WIDTH = 16
_ROW = 4 * _WIDTH


class _Built:
    def __init__(self, ground: FakeGround, handle: int) -> None:
        self.handle = handle
        self._ground = ground
        params = ctypes.create_string_buffer(32)
        self._execution = ground.driver.handle("cuGraphInstantiateWithParams", handle, ctypes.byref(params))

    def launch(self) -> None:
        self._ground.driver.call("cuGraphLaunch", self._execution, self._ground.stream)


class FakeGround:
    """The toy kernels of the tests, launched one or two a graph."""

    def __init__(self, library: str, base: int, *, recording: bool) -> None:
        os.environ |= {"FAKE_CUDA_LIBRARY": library, "TOY_CUBINS": str(TESTS / "cubins")}
        sys.path[:0] = [str(TESTS), str(_TORCH)]
        from fake_allocator import FakeAllocator  # type: ignore[import-not-found]
        from medusa_runtime.device.cupti import ModuleRecorder
        from toy import Toy, open_driver  # type: ignore[import-not-found]

        self.driver, self.stream = open_driver()
        self._recorder = ModuleRecorder(library) if recording else None
        self.memory = PlacedMemory(self.driver, torch.device("cpu"), base)
        sizes = {"weights": _WIDTH * _ROW, "gains": _ROW, INPUTS: 4 * _ROW, OUTPUTS: 64 << 10}
        for name, size in sizes.items():
            self.memory(name, size)
        self._at = {name: one.address for name, one in self.memory.ranges.items()} | {"pool": 0}
        self.pool = None
        if recording:
            torch.cuda.memory.CUDAPluggableAllocator = FakeAllocator  # type: ignore[misc]
            torch.cuda.MemPool = lambda allocator: allocator  # type: ignore[assignment, misc]
            self.pool = open_pool(self.driver, POOL_BASE if base == BASE else OTHER_POOL_BASE)
            assert self.pool is not None
            memory: Any = self.pool._pool
            self._at["pool"] = memory.malloc(4096, 0, self.stream)  # as torch does before a warm-up
        self._toy: Any = Toy(self.driver, self.stream, self._at)
        if recording:
            self._toy.more_modules(filled=True)
        x, out = self._at[INPUTS], self._at[OUTPUTS]
        self.cases: Mapping[str, Callable[[], None]] = {
            "product": lambda: self._toy.gemv(self._at["weights"], x, out, _WIDTH),
            "rms norm": lambda: self._norm(x, out),
            "copy and zero": lambda: self._copy_and_zero(x, out),
            "variants": lambda: self._then(x, out, lambda: self._toy.launch_more(out)),
            "programmatic pair": lambda: self._then(x, out, lambda: self._pair(out)),
            "much shared memory": lambda: self._then(x, out, lambda: self._wide(out)),
        }

    def prepare(self) -> None:
        floats = struct.pack(f"<{_WIDTH * _WIDTH}f", *[byte / 256 for byte in fixed_bytes(_WIDTH * _WIDTH, 3)])
        self.driver.write(self._at["weights"], floats)
        self.driver.write(self._at["gains"], floats[:_ROW])
        self.driver.write(self._at[INPUTS], floats[: 4 * _ROW])

    def _norm(self, x: int, out: int) -> None:
        from toy import RMS_NORM

        pointers = [struct.pack("<Q", at) for at in (x, self._at["gains"], out)]
        self._toy.launch(RMS_NORM, [*pointers, struct.pack("<i", _WIDTH), struct.pack("<f", 1e-5)])

    def _copy_and_zero(self, x: int, out: int) -> None:
        between = self._at["pool"] + 512
        self.driver.call("cuMemcpyDtoDAsync_v2", between, x, _ROW, self.stream)
        self.driver.call("cuMemcpyDtoDAsync_v2", out, between, _ROW, self.stream)
        self.driver.call("cuMemsetD32Async", out + _ROW, 0, _WIDTH, self.stream)

    def _then(self, x: int, out: int, work: Callable[[], None]) -> None:
        self.driver.call("cuMemcpyDtoDAsync_v2", out, x, _ROW, self.stream)
        work()

    def _pair(self, out: int) -> None:
        value, count = struct.pack("<Q", out), struct.pack("<i", _WIDTH)
        self._toy.launch("scale", [value, count, struct.pack("<f", 0.5)])
        self._toy.launch("cluster_scale", [value, count], attributes={4: struct.pack("<III", 2, 1, 1), 6: b"\1"})

    def _wide(self, out: int) -> None:
        self._toy.launch("wide", [struct.pack("<Q", out), struct.pack("<i", _WIDTH)], shared=64 << 10)

    def capture(self, key: str) -> _Built:
        self.driver.call("cuStreamBeginCapture_v2", self.stream, 0)
        self.cases[key]()
        made = ctypes.c_uint64()
        self.driver.call("cuStreamEndCapture", self.stream, ctypes.byref(made))
        return _Built(self, made.value)

    def ranges(self) -> list[MemoryRange]:
        pool = [self.pool.memory_range] if self.pool is not None else []
        return [*self.memory.ranges.values(), *pool]

    def images(self) -> ImageStore:
        if self._recorder is None:
            return ImageStore()
        return ImageStore(self._recorder.images, self._recorder.handles)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()


__all__ = ["FakeGround"]
