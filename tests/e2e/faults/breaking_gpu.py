"""`medusa serve` on a GPU of host memory whose restored CUDA graphs break its context; arguments: medusa serve ….

Everything else is what serves: supervisor, zygote, engine, the mark against the bundle, the abort. In an instance the
processes are forks, so what is put in place here is in place in each.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3]))

from medusa_runtime import registry, zygote
from medusa_runtime.config import Settings
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline


class Context:
    """The device's, of which there is none."""

    def __init__(self, timeline: Timeline) -> None: ...

    def wait(self) -> None: ...


class Bundle:
    """A region's files, among them graphs."""

    from_agent = False

    def view_code(self, name: str, timeout_s: float | None = None) -> memoryview:
        from medusa_runtime.state.graphs import Blueprints
        from medusa_runtime.state.graphs.blob_format import encode_blueprints

        return memoryview(encode_blueprints(Blueprints()))


def open_engine(region: Region, settings: Settings, timeline: Timeline) -> Any:
    """In the engine's process, after its imports."""
    from medusa_runtime.engine import factory as kinds
    from medusa_runtime.engine.gpu.device import BundledGraphs
    from medusa_runtime.engine.torch import engine as torch_engine
    from medusa_runtime.errors import DeviceError
    from medusa_runtime.kernels import cuda
    from medusa_runtime.state.graphs.driver import CudaError

    from benchmarks.gpu.machine import HostGpu, _HostRestorer

    class BreakingRestorer(_HostRestorer):
        def restore_sizes(self, sizes: Sequence[int], *, validate: str = "all") -> Mapping[int, Any]:
            fault = CudaError("cuStreamSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS (700)")
            raise DeviceError("a restored CUDA graph broke the context") from fault

    class BreakingGpu(HostGpu):
        def restorer(self, model: Any, graphs: Any) -> Any:
            return BreakingRestorer(graphs)

    cuda.triton_obstacle = lambda: "host memory in place of a GPU"  # type: ignore[assignment]
    torch_engine.open_gpu = lambda *_: BreakingGpu()
    torch_engine.bundled_graphs = lambda _, settings: BundledGraphs(Bundle(), settings)  # type: ignore[arg-type]
    return kinds.open_engine(region, settings, timeline)


def main() -> int:
    from medusa_adapters.cli.main import main

    sys.modules["breaking_gpu"] = sys.modules["__main__"]
    zygote.choose = lambda *_: "cuda"
    zygote.DeviceContext = Context  # type: ignore[assignment, misc]
    registry.register(registry.engine_kind("torch")._replace(open="breaking_gpu:open_engine"))
    return main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
