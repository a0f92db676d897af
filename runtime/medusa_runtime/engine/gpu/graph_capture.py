"""Captures a model's decode graphs on this GPU and materializes them, offline (MEDUSA §3).

Two processes capture the same graphs with all memory at different addresses, which proves what is a pointer. A third
process restores and replays all graphs, so that a user's request is never the first to run one, and finds out whether
words that the two do not explain matter. If a graph breaks its context, it is started again without this graph, and in
the end without all graphs that have such a word. Each is a new process, so that the modules that the driver has loaded,
and their addresses, do not depend on earlier work.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from ...config import Settings
from ...errors import EngineError, MedusaError
from ...process_limits import as_limit_error
from ...registry import engine_kind
from ...state.kinds import CUDA_GRAPHS, KV_PLAN
from ..preimport import preimport

if TYPE_CHECKING:  # torch is imported after the recorder has begun
    from .device import Gpu
    from .runner import GpuRunner

logger = logging.getLogger(__name__)

_TIMEOUT_S = 600.0
_TRACEBACK_S = 1.0
_SECOND = "second.dump"
ATTEMPTS = "attempts"  # the file beside a check's result that says which graphs have ended a process
_MOST_ENDED = 4  # how many processes may end in a graph before all graphs that are not explained are left out
_MOST_NAMED = 64  # how many graphs are named in a line of the log
_LINES_OF_AN_ERROR = 20
# Bytes of tensors that are allocated before the dump, so that torch's own segments lie at other addresses.
_SHIFTS = (3 << 20, 24 << 20, 1 << 30)


def capture(model: str, settings: Settings, folder: Path) -> Path | None:
    """Write the model's blueprints to a file in ``folder``, and return its path; None if there is no GPU.

    Raises EngineError if capturing fails.
    """
    from ...device.choice import choose

    if choose(settings.device, os.environ) != "cuda":
        return None
    if settings.tensor_parallel > 1:
        raise EngineError(
            "CUDA graphs are materialized for one GPU, found --tensor-parallel above 1; each start captures them"
        )
    capture_settings = replace(settings, model=model, device="cuda", state="none")
    second, unchecked, result = folder / _SECOND, folder / "unchecked", folder / CUDA_GRAPHS.name
    run(capture_settings, second)
    run(capture_settings, unchecked, second)  # for the torch engine this also writes a KV plan into the folder
    _run_check(capture_settings, result, unchecked)
    return result


def _run_check(settings: Settings, out: Path, unchecked: Path) -> None:
    """Check graphs in one process after the other, each without the graphs in which an earlier one has ended."""
    from .attempts import Attempts

    attempts = Attempts(out.with_name(ATTEMPTS))
    while True:
        before = len(attempts.unfinished())
        try:
            return run(settings, out, unchecked, check=True)
        except EngineError as error:
            ended = attempts.unfinished()
            if before < len(ended) <= _MOST_ENDED:
                _, *keys = ended[-1]
                left_out = ", ".join(keys) if len(keys) <= _MOST_NAMED else f"{len(keys)} CUDA graphs"
                logger.warning("another process goes on without %s, which ended this one: %s", left_out, error)
            elif out.exists():
                logger.warning("the CUDA graphs are kept as they were checked, but then: %s", error)
                return None
            elif count := _leave_out_pinned(unchecked):
                logger.warning("%d CUDA graphs that two captures do not explain are left out: %s", count, error)
            else:
                raise


def _leave_out_pinned(file: Path) -> int:
    """Leave out of a file's blueprints the graphs that are pinned to their addresses, and return how many these are.

    Their check can break the CUDA context, and that of others in the same process then has no result.
    """
    from ...state.graphs.blob_format import decode_blueprints, save_blueprints
    from ...state.graphs.mismatch import Reason

    blueprints = decode_blueprints(file.read_bytes())
    pinned = [graph.key for graph in blueprints.graphs if graph.pinned]
    if pinned:
        why = f"{Reason.ADDRESS}: two captures do not explain it, and the process that replayed such graphs ended"
        save_blueprints(blueprints.without(dict.fromkeys(pinned, why)), file)
    return len(pinned)


def run(settings: Settings, out: Path, other: Path | None = None, *, check: bool = False) -> None:
    """Run one capturing process, which writes to ``out``. Its output is logged line by line.

    Without ``other`` it writes a dump. With another process's dump as ``other`` it writes blueprints. With ``check``,
    ``other`` has blueprints, and it writes those that can be restored. Raises EngineError, with the end of the
    process's output, if it fails or takes longer than ten minutes.
    """
    work = "checking the materialized CUDA graphs" if check else "capturing CUDA graphs"
    command = [
        sys.executable,
        "-m",
        engine_kind(settings.engine).graph_capture,
        str(out),
        *([str(other)] if other else []),
        *(["check"] if check else []),
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    late, said = threading.Event(), deque[str](maxlen=_LINES_OF_AN_ERROR)

    def end() -> None:
        late.set()
        process.send_signal(signal.SIGUSR1)  # it says where it is
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TRACEBACK_S)
        process.kill()

    timer = threading.Timer(_TIMEOUT_S, end)
    timer.start()
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it ended at once; its output says why
                process.stdin.write(json.dumps(asdict(settings)).encode())
                process.stdin.close()
            for line in process.stdout:
                said.append(line.decode(errors="replace").rstrip())
                logger.info("%s", said[-1])
            process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
            timer.join()
    if process.returncode:
        why = f"it was not done after {_TIMEOUT_S:.0f} s: " if late.is_set() else ""
        raise EngineError(f"{work} failed: {why}" + "\n".join(said))


class Task(NamedTuple):
    """What ``run`` has started a process for."""

    settings: Settings
    out: Path
    other: Path | None
    check: bool


def read_task(arguments: list[str]) -> Task:
    """Begin a process that ``run`` started: log with times, and prepare to report where it hangs.

    ``arguments`` are OUT, then optionally OTHER and "check". The settings come as JSON on standard input.
    """
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d ms  %(message)s")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    settings = Settings(**json.load(sys.stdin))
    out, *others = arguments
    return Task(settings, Path(out), Path(others[0]) if others else None, others[1:] == ["check"])


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End this process with a message, for ``run``, if a MedusaError or a limit of the system ends the context."""
    try:
        yield
    except MedusaError as error:
        sys.exit(str(error))
    except (OSError, MemoryError) as error:
        if (limit := as_limit_error(error)) is None:
            raise
        sys.exit(str(limit))


class _Closable(Protocol):
    def close(self) -> None: ...


Engine = TypeVar("Engine", bound=_Closable)


@contextmanager
def closed_after(engine: Engine) -> Iterator[Engine]:
    """Close the engine at the end of a context. An error in the context is raised even if closing fails, too."""
    try:
        yield engine
    except BaseException:
        with suppress(Exception):  # an engine whose CUDA context is broken cannot be closed in order
            engine.close()
        raise
    engine.close()


def main(arguments: list[str]) -> int:
    """Run in a process that ``run`` started for the torch engine; see ``read_task`` for the arguments."""
    settings, out, other, check = read_task(arguments)
    with errors_in_one_line():
        if check:
            assert other is not None
            _check(settings, out, other)
        else:
            _capture(settings, out, other)
    return 0


def _capture(settings: Settings, out: Path, second: Path | None) -> None:
    from ...device.cupti import ModuleRecorder

    with ModuleRecorder() as recorder:  # before anything is loaded
        preimport(settings)  # as the engines that will restore the graphs
        import torch

        from ...state.graphs.blob_format import decode_blueprints, save_blueprints
        from ...state.graphs.materialization.images import ImageStore
        from .capture import CudaCapturer
        from .device import Gpu
        from .footprint import CudaMemory
        from .graph_pool import OTHER_POOL_BASE, POOL_BASE
        from .graph_state import GraphState, summary
        from .placed_memory import BASE, OTHER_BASE
        from .static_inputs import INPUTS, OUTPUTS

        class OtherGpu(Gpu):
            def limit_blocks(self, planned: int) -> int:
                """Return half as many, so that words of a graph that depend on the number of blocks differ."""
                return max(planned // 2, 1)

        if second is None:
            gpu: Gpu = OtherGpu(base=OTHER_BASE, graph_base=OTHER_POOL_BASE)
        else:
            gpu = Gpu(base=BASE, graph_base=POOL_BASE)
        shifts = [] if second else [torch.empty(size, dtype=torch.uint8, device=gpu.device) for size in _SHIFTS]
        with _loaded(settings, gpu) as runner:
            graphs = runner.graphs
            assert graphs is not None
            capturer = graphs.capturer
            assert isinstance(capturer, CudaCapturer)
            memory = CudaMemory()
            free = memory.free()
            logger.info("the weights are loaded, %d graphs are captured", len(graphs.pending))
            while graphs.pending:
                graphs.capture_next()
            logger.info("captured")
            inputs = sum(gpu.placed.ranges[name].size for name in (INPUTS, OUTPUTS))
            taken = free - memory.free() + inputs
            state = GraphState(runner.model, graphs, gpu.placed)
            images = ImageStore(recorder.images, recorder.handles)
            logger.info("%d kernel images were loaded", len(images.data))
            if second is None:
                save_blueprints(state.dump(capturer, images), out)
            else:
                blueprints = state.materialize(capturer, images, decode_blueprints(second.read_bytes()))
                save_blueprints(blueprints, out)
                print(summary(blueprints))
                taken += sum(map(len, blueprints.images.values()))  # restoring loads a kernel's image a second time
                _measure(runner, settings, taken, out.with_name(KV_PLAN.name))
        del shifts


def _check(settings: Settings, out: Path, unchecked: Path) -> None:
    preimport(settings)
    from ...state.graphs.blob_format import decode_blueprints, save_blueprints
    from .attempts import Attempts
    from .device import Gpu
    from .graph_state import GraphState, summary

    gpu, attempts = Gpu(), Attempts(out.with_name(ATTEMPTS))
    with _loaded(settings, gpu) as runner:
        assert runner.graphs is not None
        state = GraphState(runner.model, runner.graphs, gpu.placed)
        checked = state.check(decode_blueprints(unchecked.read_bytes()), attempts)
        save_blueprints(checked, out)
        logger.info("restored in a process of its own: %s", summary(checked))
        second = decode_blueprints(unchecked.with_name(_SECOND).read_bytes())
        save_blueprints(state.unpin(checked, second, attempts), out)


@contextmanager
def _loaded(settings: Settings, gpu: Gpu) -> Iterator[GpuRunner]:
    """Open an engine, load its weights, and yield its runner.

    Raises EngineError if the model's decode steps cannot be captured.
    """
    from ...fetch.prefetcher import prefetch
    from ...region.reader import Region
    from ...timeline import Timeline
    from ..torch.engine import TorchEngine
    from .runner import GpuRunner

    timeline = Timeline.create("capture")
    region = Region.create()
    assert settings.model is not None
    fetch = threading.Thread(
        target=prefetch, args=(region, settings.model), kwargs={"settings": settings, "timeline": timeline}
    )
    fetch.start()
    with closed_after(TorchEngine(region, settings, timeline, gpu)) as engine:
        engine.wait_ready()
        fetch.join()
        runner = engine.runner
        if not isinstance(runner, GpuRunner) or runner.graphs is None:
            raise EngineError("this model's decode steps cannot be captured; see the warning above")
        yield runner


def _measure(runner: GpuRunner, settings: Settings, graph_bytes: int, out: Path) -> None:
    """Write the KV plan. This runs a large forward; if it fails, only the plan is left out."""
    from .footprint import CudaMemory, measure_kv_plan

    try:
        plan = measure_kv_plan(CudaMemory(), runner.model, runner.cache, settings, graph_bytes=graph_bytes)
    except (MedusaError, RuntimeError) as error:
        logger.warning("the KV plan is left out, each start computes one: %s", error)
        return
    out.write_bytes(plan.to_bytes())
    logger.info("a forward takes %d MiB, the graphs %d MiB", plan.activation_bytes >> 20, plan.graph_bytes >> 20)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
