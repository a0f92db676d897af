"""The probe on a real GPU: what decode steps consist of, one or two kernels a graph, and two layers in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from medusa_runtime.device.cupti import ModuleRecorder
from medusa_runtime.engine.gpu.capture import CudaCapturer, CudaGraph
from medusa_runtime.engine.gpu.graph_memory import unnamed_ranges
from medusa_runtime.engine.gpu.graph_pool import OTHER_POOL_BASE, POOL_BASE, open_pool
from medusa_runtime.engine.gpu.placed_memory import BASE, PlacedMemory
from medusa_runtime.state.graphs import CudaDriver, ImageStore, MemoryRange
from torch import Tensor

from benchmarks.gpu.probing.ground import INPUTS, OUTPUTS

_ROWS, _WIDTH, _BLOCKS = 64, 4096, 32
_SHIFTS = (3 << 20, 24 << 20)  # allocated where the base is another one, so that torch's own segments move, too


class _Replayed:
    def __init__(self, graph: CudaGraph, stream: torch.cuda.Stream) -> None:
        self._graph, self._stream = graph, stream
        self.handle = int(graph.captured.raw_cuda_graph())

    def launch(self) -> None:
        with torch.cuda.stream(self._stream):
            self._graph.replay()


class DeviceGround:
    """torch's device 0. ``recording``: whether kernel images are recorded, which must begin before any is loaded."""

    def __init__(self, base: int, *, recording: bool) -> None:
        self._recorder = ModuleRecorder() if recording else None
        self._device = torch.device("cuda", 0)
        torch.cuda.set_device(self._device)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.empty(1, device=self._device)
        self.driver = CudaDriver()
        self.memory = PlacedMemory(self.driver, self._device, base)
        self._shifts = [] if base == BASE else [torch.empty(n, dtype=torch.uint8, device=self._device) for n in _SHIFTS]
        self.pool = open_pool(self.driver, POOL_BASE if base == BASE else OTHER_POOL_BASE) if recording else None
        self._capturer = CudaCapturer(self._device, memory=self.pool, keep_graph=True)
        self.stream = int(self._capturer.stream.cuda_stream)
        self._kept: list[CudaGraph] = []
        self._weight = self._named("weights", _WIDTH, _WIDTH)
        self._gain = self._named("gains", _WIDTH)
        self._keys, self._values = (self._named(name, _BLOCKS, 16, 8, 128) for name in ("keys", "values"))
        self._x = self._named(INPUTS, _ROWS, _WIDTH)
        self._out = self._named(OUTPUTS, _ROWS, _WIDTH)
        self._tables = self.memory("tables", 4 * _BLOCKS).view(torch.int32).view(4, -1)
        self._contexts = self.memory("contexts", 4 * 8).view(torch.int64)
        self.cases: Mapping[str, Callable[[], None]] = self._cases()

    def _named(self, name: str, *shape: int) -> Tensor:
        size = 2 * torch.Size(shape).numel()
        return self.memory(name, size)[:size].view(torch.bfloat16).view(shape)

    def prepare(self) -> None:
        dice = torch.Generator().manual_seed(3)
        for tensor in (self._weight, self._gain, self._keys, self._values, self._x):
            tensor.copy_((torch.randn(tensor.shape, generator=dice) / 64).to(torch.bfloat16))
        self._out.zero_()
        self._tables.copy_(torch.arange(_BLOCKS, dtype=torch.int32).view(4, -1))
        self._contexts.copy_(torch.tensor([37, 100, 128, 1]))
        torch.cuda.synchronize()

    def _cases(self) -> dict[str, Callable[[], None]]:
        x, out = self._x, self._out
        cases: dict[str, Callable[[], None]] = {
            "product of 1 row": lambda: _put(out, F.linear(x[:1], self._weight)),
            "product of 64 rows": lambda: _put(out, F.linear(x, self._weight)),
            "rms norm": lambda: _put(out, F.rms_norm(x[:8], (_WIDTH,), self._gain, 1e-5)),
            "silu": lambda: _put(out, F.silu(x[:8]) * x[8:16]),
            "copy and zero": self._copy_and_zero,
            "two layers": self._layers,
        }
        try:
            from benchmarks.gpu.probing import triton_kernels
        except ImportError:
            return cases
        return cases | {
            "triton variants": lambda: triton_kernels.variants(x, out),
            "programmatic pair": lambda: triton_kernels.programmatic_pair(x, out),
            "attention": lambda: triton_kernels.attention(
                x, self._keys, self._values, self._tables, self._contexts, out
            ),
        }

    def _copy_and_zero(self) -> None:
        self._out[:4].copy_(self._x[:4])
        self._out[4:8].zero_()

    def _layers(self) -> None:
        hidden = self._x[:1]
        for _ in range(2):
            normed = F.rms_norm(hidden, (_WIDTH,), self._gain, 1e-5)
            hidden = hidden + F.silu(F.linear(normed, self._weight))
        _put(self._out, hidden)

    def capture(self, key: str) -> _Replayed:
        with torch.inference_mode():
            self._capturer.warm_up(self.cases[key])
            graph = self._capturer.capture(self.cases[key])
        self._kept.append(graph)
        return _Replayed(graph, self._capturer.stream)

    def ranges(self) -> list[MemoryRange]:
        known = list(self.memory.ranges.values())
        if self.pool is not None:
            known.append(self.pool.memory_range)
        segments: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return [*known, *unnamed_ranges(known, segments, self._capturer.pool)]

    def images(self) -> ImageStore:
        if self._recorder is None or self._recorder.error is not None:
            return ImageStore()
        return ImageStore(self._recorder.images, self._recorder.handles)

    def close(self) -> None:
        torch.cuda.synchronize()
        if self._recorder is not None:
            self._recorder.close()


def _put(out: Tensor, result: Tensor) -> None:
    out[: len(result)].copy_(result)


__all__ = ["DeviceGround"]
