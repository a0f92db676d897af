"""A GPU of host memory, for tests of the engine: its graphs are recorded callables."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fetching import fetch_into
from medusa_runtime.engine.gpu.decode_graphs import DecodeGraphs
from medusa_runtime.engine.gpu.device import Gpu
from medusa_runtime.engine.gpu.runner import GpuRunner
from medusa_runtime.errors import DeviceError, StateError
from medusa_runtime.kernels import cuda, paged
from medusa_runtime.kernels.pointwise import write_kv
from medusa_runtime.region.reader import Region
from strict_device import STRICT, MadeThere
from torch import Tensor

PROMPTS = [[5, 9, 33, 7], [8] * 40, [11, 12], list(range(3, 30)), [77]]


class Recorded:
    """A graph that is a callable."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.work()


class Recorder:
    def __init__(self, failing_at: int | None = None) -> None:
        self.captured: list[Recorded] = []
        self.warm_ups = 0
        self.failing_at = failing_at

    def warm_up(self, work: Callable[[], None]) -> None:
        self.warm_ups += 1
        work()

    def capture(self, work: Callable[[], None]) -> Recorded:
        if self.failing_at == len(self.captured):
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured.append(Recorded(work))
        return self.captured[-1]


class Arrived:
    def done(self) -> bool:
        return True


class HostLink:
    """Copies at once when ``open``, and returns memory that is full of NaN."""

    def __init__(self, device: torch.device, *, in_background: bool = False) -> None:
        self.device = device
        self.in_background = in_background
        self.open = threading.Event()
        self.open.set()
        self.ranges: dict[str, Tensor] = {}

    def allocate(self, name: str, size_bytes: int) -> Tensor:
        assert name not in self.ranges, f"the {name} would be placed twice"
        self.ranges[name] = torch.full((size_bytes,), 0xFF, dtype=torch.uint8, device=self.device)
        return self.ranges[name]

    def copy(self, target: Tensor, source: Tensor, *, urgent: bool, stored: Any = None) -> Arrived:
        assert self.open.wait(60)
        target.copy_(source)
        return Arrived()

    def close(self) -> None: ...


class Bundled:
    """A bundle's graphs, and why they were quarantined."""

    def __init__(self, data: bytes | None, *, reason: str | None = None, writable: bool = True) -> None:
        self.data, self.reason, self.writable = data, reason, writable
        self.noted: list[str] = []
        self.arrived = threading.Event()
        self.arrived.set()

    def has_arrived(self) -> bool:
        return self.arrived.is_set()

    def read(self) -> bytes | None:
        assert self.arrived.wait(60)
        if self.reason is not None:
            raise StateError(f"they broke the device's context before ({self.reason})")
        return self.data

    def quarantine(self, reason: str) -> bool:
        self.noted.append(reason)
        return self.writable


class HostRestorer:
    """Restores graphs that are callables. The bundle ``7`` has three sizes, of which one does not fit."""

    def __init__(self, gpu: HostGpu, graphs: DecodeGraphs) -> None:
        self.gpu, self.graphs = gpu, graphs

    def begin(self, data: bytes) -> tuple[int, ...]:
        if data == b"damaged":
            raise StateError("expected blueprints, found something else")
        self.data = data
        return self.graphs.sizes if b"breaks" in data else tuple(map(int, data.split()))

    def build(self, sizes: Sequence[int]) -> None:
        self.gpu.built.append(tuple(sizes))

    def build_one(self, sizes: Sequence[int]) -> int:
        self.build(sizes[:1])
        return sizes[0]

    def restore_sizes(self, sizes: Sequence[int], *, validate: str = "all") -> dict[int, Recorded]:
        if self.data == b"breaks":
            raise DeviceError("a restored CUDA graph broke the context")
        if self.data == b"breaks later":
            return {size: Recorded(self.gpu.fault) for size in sizes}
        self.gpu.restores.append(tuple(sizes))
        return {size: Recorded(partial(self.graphs.run_eagerly, size)) for size in sizes if size != 1}

    def close(self) -> None:
        self.gpu.closed += 1


class HostGpu(Gpu):
    """With ``strict``, its tensors cannot be mixed with the host's."""

    def __init__(self, recorder: Recorder | None, *, strict: bool = False) -> None:
        self.device = STRICT if strict else torch.device("cpu")
        self.link: HostLink = HostLink(self.device)
        self.links: list[HostLink] = []  # those of later loads
        self.recorder = recorder
        self.built: list[tuple[int, ...]] = []
        self.restores: list[tuple[int, ...]] = []
        self.closed = 0
        self.abandoned = threading.Event()

    def describe(self) -> str:
        return "host memory"

    def open_link(self, *, in_background: bool) -> HostLink:
        self.links.append(HostLink(self.device, in_background=in_background))
        return self.links[-1]

    def memory(self, name: str, size_bytes: int) -> Tensor:
        return self.link.allocate(name, size_bytes)

    def context_is_lost(self, error: Exception) -> bool:
        return isinstance(error, DeviceError)

    def abort_process(self) -> None:
        self.abandoned.set()
        raise SystemExit  # of the engine's thread

    def restorer(self, model: Any, graphs: DecodeGraphs) -> HostRestorer:
        return HostRestorer(self, graphs)

    def fault(self) -> None:
        raise DeviceError("an illegal address")

    def free_bytes_beside_weights(self, loader: Any) -> int:
        loader.wait_placed()
        return 1 << 30

    def capturer(self) -> Recorder | None:
        return self.recorder

    def as_default_device(self) -> AbstractContextManager[object]:
        return MadeThere() if self.device == STRICT else nullcontext()


class HostKernels:
    """Triton's kernels, computed by torch. Every launch waits until they are ``compiled``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled = threading.Event()
        self.waited: set[str] = set()  # the threads that waited for it
        monkeypatch.setattr(cuda, "triton_obstacle", lambda: None)
        monkeypatch.setattr(cuda, "_paged_triton", lambda: self)

    def write(self, *arguments: Tensor) -> None:
        self._wait()
        write_kv(*arguments)

    def decode(self, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, contexts: Tensor, **options: Any) -> Any:
        self._wait()
        rows = torch.arange(len(q), dtype=torch.int32, device=q.device)
        return paged.attention(q, keys, values, tables, rows, contexts, **options)

    def _wait(self) -> None:
        if not self.compiled.is_set():
            self.waited.add(threading.current_thread().name)
            assert self.compiled.wait(60)


@pytest.fixture(autouse=True)
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton may be installed, and compiles nothing without a GPU."""
    monkeypatch.setattr(cuda, "triton_obstacle", lambda: "host memory in place of a GPU")


@pytest.fixture
def region(checkpoint: Path) -> Iterator[Region]:
    region = Region.create()
    fetch_into(region, str(checkpoint))
    yield region
    region.close()


@pytest.fixture
def start(region: Region, serve_region: Callable[..., Any]) -> Callable[..., Any]:
    return partial(serve_region, region)


def runner_of(served: Any) -> GpuRunner:
    runner = served.engine.runner
    assert isinstance(runner, GpuRunner)
    return runner


def answers(served: Any) -> list[list[int]]:
    asked = [served.ask(prompt, max_tokens=20) for prompt in PROMPTS]
    return [answer.tokens for answer in asked]
