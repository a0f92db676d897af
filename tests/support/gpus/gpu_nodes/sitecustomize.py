"""Lets all processes of a node find GPUs, whose memory is the host's. Its folder is in their PYTHONPATH.

``NVML`` is the path of a fake of NVIDIA's management library, which describes them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from medusa_runtime.device import choice, nvml

_SUPPORT = Path(__file__).parents[2]


def _obstacle(environ: Any, *_: Any) -> str | None:
    return "hidden" if environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1") else None


def _open_gpu(settings: Any, timeline: Any) -> Any:
    if settings.device != "cuda":
        return None
    sys.path += [str(_SUPPORT / folder) for folder in ("gpus", "models")]
    from host_gpu import HostGpu, Recorder
    from medusa_runtime.kernels import cuda

    cuda.triton_obstacle = lambda: "host memory in place of a GPU"
    with timeline.stage("device") as detail:
        detail["visible"] = os.environ.get("CUDA_VISIBLE_DEVICES")
        return HostGpu(Recorder())


class _NoContext:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait(self) -> None: ...


class _Replaced(importlib.abc.MetaPathFinder):
    """Replaces names of modules as soon as these are imported: here, that would be too early, and take too long."""

    def __init__(self, names: dict[str, dict[str, Any]]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name not in self._names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        executed: Callable[[ModuleType], None] = spec.loader.exec_module

        def execute(module: ModuleType) -> None:
            executed(module)
            vars(module).update(self._names[name])

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


choice.obstacle = _obstacle
nvml.LIBRARY = os.environ["NVML"]
sys.meta_path.insert(
    0,
    _Replaced(
        {
            "medusa_runtime.engine.gpu.device": {"open_gpu": _open_gpu},
            "medusa_runtime.device.context": {"DeviceContext": _NoContext},
        }
    ),
)
