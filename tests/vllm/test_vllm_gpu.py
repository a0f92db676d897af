"""How the worker for GPUs uses vLLM's own classes, as far as a machine without a GPU can show."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from medusa_runtime.config import Settings
from vllm_gpu_parts import FakeGraph, adopt, describe

pytestmark = pytest.mark.vllm


def restored(parts: Any, *sizes: int) -> Any:
    keys = [parts.graphs.key_of(describe(parts, size)) for size in sizes]
    return parts.graphs.RestoredDecodeGraphs({key: FakeGraph() for key in keys}, parts.torch.arange(8.0).view(4, 2))


_IMPORTS = """
import torch
from medusa_vllm import imports
from vllm.platforms import current_platform
type(current_platform).is_cpu = lambda self: False
imports._import_all()
print(torch.cuda.Stream.__module__, torch.cuda.Event.__module__, torch.cuda.set_stream.__module__)
"""


def test_an_import_for_a_gpu_leaves_torchs_streams_as_they_are() -> None:
    """vLLM's worker for CPUs replaces them when it is imported, by streams and events that do nothing."""
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    streams = "torch.cuda.streams"
    assert done.stdout.splitlines()[-1] == f"{streams} {streams} vllm.utils.torch_utils", done.stdout


def test_the_classes_are_the_ones_that_these_hooks_were_written_for(parts: Any) -> None:
    """If vLLM renames what is overridden, it must be noticed here and not on a GPU."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    names = ("init_device", "load_model", "determine_available_memory", "initialize_from_config")
    for name in (*names, "compile_or_warm_up_model"):
        assert name in vars(Worker)
    assert "self.cudagraph_manager = ModelCudaGraphManager(" in inspect.getsource(GPUModelRunner.initialize_kv_cache)
    capturing = inspect.getsource(parts.vllm.CudaGraphManager.capture)
    for used in ("self._capture_descs[mode]", "self.graphs[desc] = graph", "self._graphs_captured = True"):
        assert used in capturing
    assert "forward_fn = create_forward_fn(desc, warmup=True)" in capturing


def test_all_graphs_take_the_pool_that_one_name_says(parts: Any) -> None:
    """It is given another pool where graphs are materialized, before anything has asked for it."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.platforms.interface import Platform

    assert "cls._global_graph_pool is None" in inspect.getsource(Platform.get_global_graph_pool)
    for kind in (parts.vllm.CudaGraphManager, CUDAGraphWrapper):
        assert "current_platform.get_global_graph_pool()" in inspect.getsource(kind.__init__)


def test_wrappers_of_compiled_functions_are_what_these_hooks_were_written_for(parts: Any) -> None:
    from vllm.compilation.backends import VllmBackend, wrap_with_cudagraph_if_needed
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.compilation.piecewise_backend import PiecewiseBackend

    of_a_function = inspect.getsource(PiecewiseBackend.__init__)
    for used in ("vllm_backend", "piecewise_compile_index", "is_last_graph"):
        assert f"self.{used} =" in of_a_function
    assert "self.prefix =" in inspect.getsource(VllmBackend.__init__)
    assert "runtime_mode=CUDAGraphMode.PIECEWISE" in inspect.getsource(wrap_with_cudagraph_if_needed)
    called = inspect.getsource(CUDAGraphWrapper.__call__)
    for used in ("batch_descriptor not in self.concrete_cudagraph_entries", "entry.cudagraph.replay()"):
        assert used in called
    assert "return entry.output" in called
    described = inspect.getsource(parts.vllm.ModelCudaGraphManager.capture)
    assert "num_active_loras=desc.num_active_loras" in described


def test_restored_graphs_take_the_places_of_captured_ones(parts: Any, manager: Any) -> None:
    made = adopt(parts, manager, lambda manager: restored(parts, 1, 2, 4))
    made.capture()
    assert made.captured == []
    chosen = made.dispatch(num_reqs=3, num_tokens=3, uniform_token_count=1, num_active_loras=0)
    assert chosen == describe(parts, 4)
    assert made.run_fullgraph(chosen).tolist() == made.hidden_states.tolist()
    assert made.graphs[chosen].replays == 1


def test_what_is_missing_is_captured(parts: Any, manager: Any) -> None:
    made = adopt(parts, manager, lambda manager: restored(parts, 2))
    made.capture()
    assert made.captured == [4, 1]
    assert len(made.graphs) == 3
    assert made.needs_capture(), "the list of what can be captured is vLLM's again"
    assert [one.num_tokens for one in made._capture_descs[parts.modes.FULL]] == [4, 2, 1]


def test_piecewise_graphs_are_left_to_vllm_where_nobody_restores_them(parts: Any, manager: Any) -> None:
    manager._capture_descs[parts.modes.PIECEWISE] = [describe(parts, 4, "PIECEWISE")]
    made = adopt(parts, manager, lambda manager: restored(parts, 1, 2, 4))
    made.capture()
    assert made.captured == [4]
    assert len(made.graphs) == 4


@pytest.mark.parametrize("failing", [None, RuntimeError("of another driver")])
def test_without_a_bundle_everything_is_captured(
    parts: Any, manager: Any, failing: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    def restore(manager: Any) -> None:
        if failing:
            raise failing

    made = adopt(parts, manager, restore)
    made.capture()
    assert made.captured == [4, 2, 1]
    assert ("of another driver" in caplog.text) == bool(failing)


def test_vllms_throw_away_captures_restore_nothing(parts: Any, manager: Any) -> None:
    manager._capture_mem_samples = []
    made = adopt(parts, manager, lambda manager: pytest.fail("asked for graphs in a pool that is thrown away"))
    made.capture()
    assert made.captured == [4, 2, 1]


def test_keys_differ_where_graphs_do(parts: Any) -> None:
    one = describe(parts, 1)
    key = parts.graphs.key_of
    assert key(one) == key(describe(parts, 1))
    assert len({key(one), key(describe(parts, 2)), key(describe(parts, 1, "PIECEWISE"))}) == 3


def test_inputs_are_read_behind_the_work_that_fills_them() -> None:
    """vLLM fills them on a stream of its own, for which a copy from the device does not wait."""
    from medusa_runtime.state.graphs import MemoryRange, RangeKind
    from medusa_vllm.gpu.graph_state import VllmGraphState

    class Driver:
        contents = b"old"

        def call(self, function: str) -> None:
            assert function == "cuCtxSynchronize"
            self.contents = b"new"

        def read(self, address: int, size: int) -> bytes:
            return self.contents[:size]

    one = MemoryRange("input_buffers.positions", RangeKind.NAMED, 4096, 3)
    state = VllmGraphState(Driver(), None, None, segments=list)  # type: ignore[arg-type]
    assert state.read([one]) == ((one, b"new"),)


def test_a_model_whose_code_cannot_be_attached_has_full_graphs_alone(parts: Any) -> None:
    """It runs eagerly, so no compiled function has piecewise graphs: not even those of the bundle."""
    from medusa_vllm.compiled.settings import _run_eagerly
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
    from vllm.config import CompilationConfig
    from vllm.v1.attention.backend import AttentionCGSupport

    class Compiled(parts.torch.nn.Module, TorchCompileWithNoGuardsWrapper):  # type: ignore[misc]
        def __init__(self) -> None:
            parts.torch.nn.Module.__init__(self)
            self.do_not_compile = False

    def mode() -> Any:
        config = CompilationConfig(mode=3, cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=[1, 2])
        has_pieces = parts.vllm.has_compiled_submodule(model)
        return config.resolve_cudagraph_mode_and_sizes(
            AttentionCGSupport.ALWAYS, None, use_v2_model_runner=True, piecewise_capture_available=has_pieces
        )

    model = parts.torch.nn.Sequential(Compiled())
    assert mode() == parts.modes.FULL_AND_PIECEWISE
    try:
        _run_eagerly(model)
        assert mode() == parts.modes.FULL_DECODE_ONLY
    finally:
        parts.torch.compiler.set_stance("default")


@pytest.mark.parametrize("lost", [False, True])
def test_a_context_that_breaks_in_a_step_is_written_down_and_ends_the_process(
    parts: Any, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """A restored graph may break it for some inputs only: the next engine would end in the same request."""
    from medusa_vllm.engine import VllmEngine
    from medusa_vllm.executor import OneProcessExecutor

    def run_step() -> None:
        raise RuntimeError("an illegal memory access")

    noted: list[str] = []
    monkeypatch.setattr(parts.worker, "abort", partial(sys.exit, "like a crash"))
    worker = parts.worker.GpuWorker.__new__(parts.worker.GpuWorker)
    worker.__dict__["_bundled"] = SimpleNamespace(quarantine=lambda reason: noted.append(reason) or True)
    executor = OneProcessExecutor.__new__(OneProcessExecutor)
    executor.driver_worker = SimpleNamespace(worker=worker)
    engine = VllmEngine.__new__(VllmEngine)
    engine._core = SimpleNamespace(run_step=run_step, model_executor=executor)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine._step()  # nothing was restored
    worker._graph_state = SimpleNamespace(context_is_lost=lambda: lost)
    expected = (SystemExit, "like a crash") if lost else (RuntimeError, "illegal memory access")
    with pytest.raises(expected[0], match=expected[1]):
        engine._step()
    assert noted == (["an illegal memory access"] if lost else [])


@pytest.mark.parametrize("how", ["fits", "another GPU", "no thread"])
def test_kernels_are_loaded_before_there_is_a_cache(
    parts: Any, fake_cuda: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """With what can be known then. If they cannot be, a start goes on, and what restores them says why."""
    from medusa_runtime.state.graphs import CudaDriver
    from medusa_vllm.gpu.graph_state import KV_BYTES, begin_loading, fingerprint_of

    from benchmarks.graph_restore import blueprints

    driver, runner = CudaDriver(str(fake_cuda)), SimpleNamespace()
    runner.model_config = SimpleNamespace(hf_config={}, dtype="float32")
    driver.call("cuInit", 0)
    driver.call("cuCtxSetCurrent", driver.handle("cuDevicePrimaryCtxRetain", 0))
    found = {**fingerprint_of(driver, runner), KV_BYTES: "4096"}
    if how == "another GPU":
        found["gpu"] = "Fake B200"
    if how == "no thread":
        monkeypatch.setattr(threading.Thread, "start", no_thread)
    finder = begin_loading(driver, runner, replace(blueprints(1, 2, 3), fingerprint=found))
    assert (finder is not None) == (how == "fits")
    if finder is not None:
        assert finder.handle(0, "decode-0").kern
        finder.close()


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_plan_for_a_gpu_looks_at_the_gpus_memory(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are there once, and each rank has a part of them."""
    from medusa_vllm.cpu import kv_budget
    from vllm.platforms import current_platform

    shards = [SimpleNamespace(data_bytes=30 << 30, path=None)]
    region: Any = SimpleNamespace(wait_index=lambda: SimpleNamespace(shards=shards), progress=lambda: None)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    monkeypatch.setattr(parts.torch.cuda, "mem_get_info", lambda: (80 << 30, 100 << 30))
    assert kv_budget._free_bytes(region, Settings()) == 50 << 30
    assert kv_budget._free_bytes(region, Settings(tensor_parallel=2)) == 65 << 30
