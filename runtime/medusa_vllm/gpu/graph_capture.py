"""Lets vLLM capture its decode graphs on this GPU, and materializes them, offline.

Two processes do so, one after the other. Nothing has the same address in both. A third process starts as an instance
does, and leaves out the graphs that do not give their outputs there. The Triton kernels that they have compiled are
kept, too.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_runtime.config import Settings
from medusa_runtime.engine.gpu.graph_capture import ATTEMPTS, closed_after, errors_in_one_line, read_task
from medusa_runtime.errors import EngineError, MedusaError

from medusa_vllm import TRITON_KERNELS

from ..offline import fetch_and_import, load
from ..version import MISSING_PART_ERRORS, installed_version, missing_part
from . import triton_kernels

if TYPE_CHECKING:  # vLLM is imported after the recorder of kernel images has begun
    from medusa_runtime.state.graphs import Blueprints, ImageStore

    from .recording import Recording

logger = logging.getLogger(__name__)

_CACHE = "triton"  # the folder beside a result in which Triton keeps what it compiles
_SHIFTS = (3 << 20, 24 << 20, 1 << 30)  # bytes allocated for the dump before weights, KV cache and captures


def main(arguments: list[str]) -> int:
    """Write a dump, blueprints, or those that can be restored; see ``run`` of the runtime's module of this name."""
    settings, out, other, check = read_task(arguments)
    triton_kernels.keep_in(out.with_name(_CACHE))  # of all these processes, so only the first one compiles
    if settings.compile == "auto":  # as in an instance: the bundle has the compiled code, too
        settings = replace(settings, compile="always")
    with errors_in_one_line():
        try:
            if check:
                assert other is not None
                _check(settings, out, other)
            else:
                _capture(settings, out, other)
        except (MedusaError, *MISSING_PART_ERRORS) as error:
            if (part := missing_part(error)) is None:
                raise
            sys.exit(f"vLLM {installed_version()}: {part}")
    return 0


def _capture(settings: Settings, out: Path, second: Path | None) -> None:
    from medusa_runtime.device.cupti import ModuleRecorder

    with ModuleRecorder() as recorder:  # before anything is loaded
        from medusa_runtime.engine.gpu.graph_state import summary
        from medusa_runtime.state.graphs import ImageStore
        from medusa_runtime.state.graphs.blob_format import decode_blueprints, save_blueprints

        with _recorded(settings, shifted=second is None) as recording:
            logger.info("vLLM has captured its graphs")
            images = ImageStore(recorder.images, recorder.handles)
            logger.info("%d kernel images were loaded", len(images.data))
            if second is None:
                save_blueprints(recording.state.dump(images), out)
            else:
                made = _materialize(recording, images, decode_blueprints(second.read_bytes()))
                save_blueprints(made, out)
                print(summary(made))


def _check(settings: Settings, out: Path, unchecked: Path) -> None:
    region, timeline = fetch_and_import(settings)
    from medusa_runtime.engine.gpu.attempts import Attempts
    from medusa_runtime.engine.gpu.graph_state import summary
    from medusa_runtime.state.graphs.blob_format import decode_blueprints, save_blueprints

    from ..engine import VllmEngine
    from .graph_check import GraphCheck
    from .worker import GpuWorker

    check = GraphCheck(decode_blueprints(unchecked.read_bytes()), Attempts(out.with_name(ATTEMPTS)))
    GpuWorker.check = check
    with closed_after(VllmEngine(region, settings, timeline)) as engine:
        load(engine)
        checked = check.result()
        save_blueprints(checked, out)
        logger.info("restored in a process of its own: %s", summary(checked))
    made_for = triton_kernels.purpose(engine.config, settings.vllm_args)
    try:
        count = triton_kernels.pack(out.with_name(_CACHE), out.with_name(TRITON_KERNELS.name), made_for)
        logger.info("%d Triton kernels were compiled", count)
    except OSError as error:  # a full disk, say: the graphs are there
        logger.warning("the Triton kernels are left out: %s", error)


@contextmanager
def _recorded(settings: Settings, *, shifted: bool) -> Iterator[Recording]:
    """Start vLLM as an instance does, with a graph manager that keeps what it captures, until the context ends."""
    region, timeline = fetch_and_import(settings)
    from medusa_runtime.engine.gpu.graph_pool import OTHER_POOL_BASE, POOL_BASE
    from medusa_runtime.state.graphs import CudaDriver

    from ..engine import VllmEngine
    from .graph_state import VllmGraphState, materialize_obstacle
    from .recording import Recording
    from .worker import GpuWorker

    recording = Recording(OTHER_POOL_BASE, shifts=_SHIFTS) if shifted else Recording(POOL_BASE)
    GpuWorker.recording = recording
    recording.attach(lambda runner, manager: VllmGraphState(CudaDriver(), runner, manager, pool=recording.pool))
    with closed_after(VllmEngine(region, settings, timeline)) as engine:
        load(engine)
        if recording.manager is None or not recording.inputs:
            raise EngineError("vLLM has captured no full graph of a decode here; see its log for why")
        if reason := materialize_obstacle(recording.runner, recording.manager):
            raise EngineError(f"vLLM's CUDA graphs are captured at each start: {reason}")
        yield recording


def _materialize(recording: Recording, images: ImageStore, second: Blueprints) -> Blueprints:
    import torch

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    made: Blueprints = recording.state.materialize(recording, images, second, stream=stream)
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
