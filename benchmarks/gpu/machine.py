"""The machine that the parts run on: a GPU, or, for a dry run, host memory in its place."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from medusa_runtime.config import Settings
from medusa_runtime.engine.gpu.device import Gpu
from medusa_runtime.errors import DeviceError
from torch import Tensor

if TYPE_CHECKING:
    from benchmarks.gpu.timed_driver import TimedDriver


class Machine(Protocol):
    name: str
    device: torch.device

    def gpu(self) -> Gpu: ...

    def synchronize(self) -> None: ...

    def time_ms(self, work: Callable[[], object], repeats: int) -> list[float]:
        """Milliseconds of each of ``repeats`` runs, after one that is not counted."""

    def timed(self, gpu: Gpu) -> TimedDriver | None:
        """Measure each call of the driver from now on, with which graphs are restored; None if that cannot be done."""

    def materialize(self, settings: Settings, folder: Path) -> Path | None: ...

    def summary(self, bundle: bytes) -> Mapping[str, object]:
        """Return what a bundle contains, and what was refused for which reason."""

    def without_images(self, bundle: bytes) -> bytes:
        """The same graphs without the kernels' images."""


def machine(*, dry_run: bool) -> Machine:
    return HostMachine() if dry_run else CudaMachine()


class CudaMachine:
    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.name = torch.cuda.get_device_name(self.device)

    def gpu(self) -> Gpu:
        return Gpu()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def time_ms(self, work: Callable[[], object], repeats: int) -> list[float]:
        work()
        torch.cuda.synchronize()
        times = []
        for _ in range(repeats):
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return times

    def timed(self, gpu: Gpu) -> TimedDriver | None:
        from benchmarks.gpu.timed_driver import TimedDriver

        try:
            gpu.placed.driver = timed = TimedDriver(gpu.placed.driver.file)
        except DeviceError:  # no C compiler
            return None
        return timed

    def materialize(self, settings: Settings, folder: Path) -> Path | None:
        from medusa_runtime.engine.gpu.graph_capture import capture

        assert settings.model is not None
        return capture(settings.model, settings, folder)

    def summary(self, bundle: bytes) -> Mapping[str, object]:
        from medusa_runtime.engine.gpu.graph_state import summary
        from medusa_runtime.state.graphs.blob_format import decode_blueprints

        return summary(decode_blueprints(bundle))

    def without_images(self, bundle: bytes) -> bytes:
        from medusa_runtime.state.graphs.blob_format import decode_blueprints, encode_blueprints

        return encode_blueprints(replace(decode_blueprints(bundle), images={}))


class HostMachine:
    """Host memory in place of a GPU. Its numbers mean nothing; it runs every part before a GPU is there."""

    name = "dry run, no GPU"
    device = torch.device("cpu")

    def __init__(self) -> None:
        from medusa_runtime.kernels import cuda

        cuda.triton_obstacle = lambda: "a dry run"  # type: ignore[assignment] # it may be installed, and runs nothing without a GPU

    def gpu(self) -> Gpu:
        return HostGpu()

    def synchronize(self) -> None: ...

    def time_ms(self, work: Callable[[], object], repeats: int) -> list[float]:
        work()
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            work()
            times.append((time.perf_counter() - begin) * 1e3)
        return times

    def timed(self, gpu: Gpu) -> TimedDriver | None:
        return None

    def materialize(self, settings: Settings, folder: Path) -> Path | None:
        path = folder / "cuda-graphs"
        path.write_bytes(b"dry run")
        return path

    def summary(self, bundle: bytes) -> Mapping[str, object]:
        return {}

    def without_images(self, bundle: bytes) -> bytes:
        return bundle


class _Arrived:
    def done(self) -> bool:
        return True


class _HostLink:
    def allocate(self, name: str, size_bytes: int) -> Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor, *, urgent: bool, stored: Any = None) -> _Arrived:
        target.copy_(source)
        return _Arrived()

    def close(self) -> None: ...


class _Recorded:
    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class _Recorder:
    def warm_up(self, work: Callable[[], None]) -> None:
        work()

    def capture(self, work: Callable[[], None]) -> _Recorded:
        return _Recorded(work)


class _HostRestorer:
    def __init__(self, graphs: Any) -> None:
        self._graphs = graphs

    def begin(self, data: bytes) -> Sequence[int]:
        return tuple(self._graphs.sizes)

    def build(self, sizes: Sequence[int]) -> None: ...

    def build_one(self, sizes: Sequence[int]) -> int:
        return sizes[0]

    def restore_sizes(self, sizes: Sequence[int], *, validate: str = "all") -> Mapping[int, Any]:
        return {size: _Recorded(partial(self._graphs.run_eagerly, size)) for size in sizes}

    def close(self) -> None: ...


class HostGpu(Gpu):
    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.link = _HostLink()

    def describe(self) -> str:
        return "host memory"

    def open_link(self, *, in_background: bool) -> Any:
        return _HostLink()

    def memory(self, name: str, size_bytes: int) -> Tensor:
        return self.link.allocate(name, size_bytes)

    def free_bytes_beside_weights(self, loader: Any) -> int:
        loader.wait_placed()
        return 1 << 30

    def capturer(self) -> Any:
        return _Recorder()

    def as_default_device(self) -> AbstractContextManager[object]:
        return nullcontext()

    def restorer(self, model: Any, graphs: Any) -> Any:
        return _HostRestorer(graphs)
