"""Lets vLLM capture its decode graphs on this GPU, and materializes them, offline.

Two processes do so, one after the other. Nothing has the same address in both. A third process starts as an instance
does, and leaves out the graphs that do not give their outputs there. What the first one compiles is kept, too: the
others, and instances, start with it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_runtime.config import Settings
from medusa_runtime.engine.base import SamplingParams
from medusa_runtime.engine.gpu.graph_capture import ATTEMPTS, closed_after, errors_in_one_line, read_task
from medusa_runtime.errors import EngineError, MedusaError

from medusa_vllm import COMPILE_CACHE, TRITON_KERNELS

from ..compiled import cache
from ..compiled.model import INDEX
from ..offline import complete, fetch_and_import, load, serve_beside
from ..version import MISSING_PART_ERRORS, installed_version, missing_part
from . import triton_kernels

if TYPE_CHECKING:  # vLLM is imported after the recorder of kernel images has begun
    from medusa_runtime.state.graphs import Blueprints, ImageStore

    from ..engine import VllmEngine
    from .recording import Recording

logger = logging.getLogger(__name__)

_TOKENS = 3  # of an answer to each of the first requests
_COMPILED = "compiled"  # the folder beside a result into which the first process writes what it compiles
# The requests that an instance may get first. Triton compiles other kernels for numbers that are 1 or divisible by 16.
_SAMPLED = (
    SamplingParams(max_tokens=_TOKENS, ignore_eos=True, temperature=0.0),
    SamplingParams(max_tokens=_TOKENS, ignore_eos=True, seed=1),
    SamplingParams(max_tokens=_TOKENS, ignore_eos=True, top_p=0.9, top_k=9),
)
_BATCHES = (1, 2, 16)
_SHIFTS = (3 << 20, 24 << 20, 1 << 30)  # bytes allocated for the dump before weights, KV cache and captures


def main(arguments: list[str]) -> int:
    """Write a dump, blueprints, or those that can be restored; see ``run`` of the runtime's module of this name."""
    settings, out, other, check = read_task(arguments)
    os.environ |= cache.cache_folders(out.with_name("caches"))  # of all these processes, so only the first compiles
    if settings.compile == "auto":  # an eager start is the shorter one, and restored decodes need no compiler
        settings = replace(settings, compile="never")
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

        with _recorded(settings, out, shifted=second is None) as recording:
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
    try:
        with closed_after(VllmEngine(region, settings, timeline, code=_compiled_code(out))) as engine:

            def result_and_requests() -> None:
                checked = check.result()
                save_blueprints(checked, out)
                logger.info("restored in a process of its own: %s", summary(checked))
                check.begin_requests(checked)
                _complete_first_requests(engine, settings.max_concurrency)

            serve_beside(engine, result_and_requests)
    except MedusaError as error:
        if not out.exists() or check.context_is_lost():
            raise
        logger.warning("not all kernels of first requests can be kept: %s", error)
    check.end_requests()
    made_for = triton_kernels.purpose(engine.config, settings.vllm_args)
    try:
        count = triton_kernels.pack(Path(os.environ["TRITON_CACHE_DIR"]), out.with_name(TRITON_KERNELS.name), made_for)
        logger.info("%d Triton kernels were compiled", count)
    except OSError as error:  # a full disk, say: the graphs are there
        logger.warning("the Triton kernels are left out: %s", error)


def _complete_first_requests(engine: VllmEngine, most: int) -> None:
    """Let the engine complete batches of at most ``most`` requests, for which Triton compiles its kernels."""
    longest = max(engine.info.max_model_len - _TOKENS, 1)
    for number, params in enumerate(_SAMPLED):
        for count in _BATCHES:
            prompts = [[(row + number) % engine.info.vocab_size] * min(count, longest) for row in range(count)]
            complete(engine, prompts[:most], params, f"first-{number}-{count}")


@contextmanager
def _recorded(settings: Settings, out: Path, *, shifted: bool) -> Iterator[Recording]:
    """Start vLLM as an instance does, with a graph manager that keeps what it captures, until the context ends.

    The ``shifted`` process compiles, and leaves the compiled code beside ``out`` for the next ones.
    """
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
    is_first = shifted and settings.compile == "always"
    capture, code = (out.with_name(_COMPILED), None) if is_first else (None, _compiled_code(out))
    if capture is not None:
        capture.mkdir()
    with closed_after(VllmEngine(region, settings, timeline, capture=capture, code=code)) as engine:
        load(engine)
        if capture is not None and (capture / INDEX).exists():
            cache.ARCHIVE.pack(capture, out.with_name(COMPILE_CACHE.name))
        if recording.manager is None or not recording.inputs:
            raise EngineError("vLLM has captured no full graph of a decode here; see its log for why")
        if reason := materialize_obstacle(recording.runner, recording.manager):
            raise EngineError(f"vLLM's CUDA graphs are captured at each start: {reason}")
        yield recording


def _compiled_code(out: Path) -> bytes | None:
    """Return the compile cache that the first process has left beside ``out``."""
    blob = out.with_name(COMPILE_CACHE.name)
    return blob.read_bytes() if blob.exists() else None


def _materialize(recording: Recording, images: ImageStore, second: Blueprints) -> Blueprints:
    import torch

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    made: Blueprints = recording.state.materialize(recording, images, second, stream=stream)
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
