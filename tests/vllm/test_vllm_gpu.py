"""How the worker for GPUs uses vLLM's own classes, as far as a machine without a GPU can show."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.errors import DeviceError

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = pytest.mark.vllm


class FakeGraph:
    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def parts() -> Any:
    """vLLM's classes, imported here because collecting tests must not take twenty seconds."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what they import
        from medusa_vllm.gpu import graphs as gpu_graphs
        from medusa_vllm.gpu import worker as gpu_worker
        from vllm.config.compilation import CUDAGraphMode
        from vllm.v1.worker.gpu import cudagraph_utils

    return SimpleNamespace(torch=torch, graphs=gpu_graphs, worker=gpu_worker, modes=CUDAGraphMode, vllm=cudagraph_utils)


def describe(parts: Any, tokens: int, mode: str = "FULL") -> Any:
    return parts.vllm.BatchExecutionDescriptor(
        cg_mode=parts.modes[mode], num_tokens=tokens, num_reqs=tokens, uniform_token_count=1
    )


@pytest.fixture
def manager(parts: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's manager for batches of 4, 2 and 1, made without the distributed state that its constructor asks for.

    What it would capture on a GPU are fake graphs here.
    """
    made = parts.vllm.ModelCudaGraphManager.__new__(parts.vllm.ModelCudaGraphManager)
    full = [describe(parts, tokens) for tokens in (4, 2, 1)]
    made.__dict__.update(
        graphs={},
        hidden_states=None,
        use_aux_hidden_state_outputs=False,
        is_last_pp_rank=True,
        _capture_descs={parts.modes.FULL: full},
        _candidates={(tokens, 0): [describe(parts, size)] for tokens, size in ((1, 1), (2, 2), (3, 4), (4, 4))},
        _lora_dispatch_map={},
        _max_lora_case=0,
        _graphs_captured=False,
        _capture_mem_samples=None,
        captured=[],
    )

    def capture(self: Any, *arguments: Any, **options: Any) -> None:
        for descriptions in self._capture_descs.values():
            for description in descriptions:
                assert description not in self.graphs, "it has one already"
                self.graphs[description] = FakeGraph()
                self.captured.append(description.num_tokens)
        self._graphs_captured = True

    monkeypatch.setattr(parts.vllm.ModelCudaGraphManager, "capture", capture)
    return made


def restored(parts: Any, *sizes: int) -> Any:
    keys = [parts.graphs.key_of(describe(parts, size)) for size in sizes]
    return parts.graphs.RestoredDecodeGraphs({key: FakeGraph() for key in keys}, parts.torch.arange(8.0).view(4, 2))


def adopt(parts: Any, manager: Any, restore: Any) -> Any:
    return parts.graphs.GraphManager.of(manager, restore, parts.graphs.NoTimeline())


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


def test_the_pool_is_there_before_vllm_makes_anything_that_captures(
    worker: Any, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    recording = SimpleNamespace(
        open_pool=lambda driver: steps.append("pool"), shift=lambda device: steps.append("shift")
    )
    monkeypatch.setattr(parts.worker, "CudaDriver", lambda: None)
    monkeypatch.setattr(parts.worker.Worker, "init_device", lambda self: steps.append("device"))
    worker.init_device()
    monkeypatch.setattr(type(worker), "recording", recording)
    worker.init_device()
    assert steps == ["device", "device", "pool", "shift"]


def test_a_gpu_that_the_image_was_not_built_for_is_one_error(
    worker: Any, parts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm.platforms.interface import DeviceCapability

    steps: list[str] = []
    monkeypatch.setattr(parts.worker.Worker, "init_device", lambda self: steps.append("device"))
    platform = SimpleNamespace(get_device_name=lambda rank: f"GPU {rank}", get_device_capability=None)
    monkeypatch.setattr(parts.worker, "current_platform", platform)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    platform.get_device_capability = lambda rank: DeviceCapability(8, 9)
    worker.init_device()
    (tmp_path / "medusa-gpus.txt").write_text("9.0\n")
    with pytest.raises(DeviceError, match=r"capability 9\.0, for which this image was built, found GPU 0 of 8\.9"):
        worker.init_device()
    platform.get_device_capability = lambda rank: DeviceCapability(9, 0)
    worker.init_device()
    assert steps == ["device", "device"]


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


@pytest.fixture
def worker(parts: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = parts.worker.GpuWorker.__new__(parts.worker.GpuWorker)
    made.device = parts.torch.device("cpu")
    made.local_rank = 0
    made.load_config = SimpleNamespace(model_loader_extra_config={})
    made.cache_config = SimpleNamespace(kv_cache_memory_bytes=4 << 30)
    monkeypatch.setattr(parts.worker, "free_bytes", lambda device: 8 << 30)
    monkeypatch.setattr(parts.worker.Worker, "determine_available_memory", lambda self: 3 << 30)
    return made


def test_a_planned_cache_runs_no_forward(worker: Any, parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts.worker.Worker, "determine_available_memory", lambda self: pytest.fail("it measured"))
    assert worker.determine_available_memory() == 4 << 30


def test_a_plan_that_does_not_fit_now_is_measured_again(
    worker: Any, parts: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parts.worker, "free_bytes", lambda device: 4 << 30)
    assert worker.determine_available_memory() == 3 << 30
    assert worker.cache_config.kv_cache_memory_bytes is None, "vLLM would take the plan as it is"
    assert "4096 MiB of the GPU's memory are free" in caplog.text


def test_no_room_for_a_cache_is_told(worker: Any, parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from medusa_runtime.errors import ConfigError

    worker.cache_config.kv_cache_memory_bytes = None
    monkeypatch.setattr(parts.worker.Worker, "determine_available_memory", lambda self: -1)
    with pytest.raises(ConfigError, match="no memory left for a KV cache"):
        worker.determine_available_memory()


@pytest.mark.parametrize(
    ("name", "arguments", "what"),
    [
        ("init_device", (), "the buffers of vLLM"),
        ("load_model", (), "the weights"),
        ("determine_available_memory", (), "the largest step, which measures what is left for the KV cache"),
        ("initialize_from_config", (None,), "the KV cache"),
        ("compile_or_warm_up_model", (), "the warm-up and the CUDA graphs"),
    ],
)
def test_a_full_gpu_is_told_in_one_line(
    worker: Any, parts: Any, monkeypatch: pytest.MonkeyPatch, name: str, arguments: tuple[Any, ...], what: str
) -> None:
    """Whatever vLLM allocates there."""
    from medusa_runtime.errors import DeviceError

    def full(*_: Any, **__: Any) -> None:
        raise parts.torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.25 GiB "
            "is free. Process 7 has 77.85 GiB memory in use."
        )

    worker.cache_config.kv_cache_memory_bytes, worker.local_rank = None, 0
    monkeypatch.setattr(parts.worker.Worker, name, full)
    with pytest.raises(DeviceError) as raised:
        getattr(worker, name)(*arguments)
    assert str(raised.value) == (
        f"the GPU's memory has no room for {what} (Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
        "of which 1.25 GiB is free); use a larger GPU, lower --max-batched-tokens, --max-concurrency or --kv-cache-mb, "
        "or end what else runs on this one"
    )


def test_the_runners_manager_is_replaced_once_the_cache_is_there(
    worker: Any, parts: Any, manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.model_runner = SimpleNamespace(cudagraph_manager=None)

    def initialize(self: Any, kv_cache_config: Any) -> None:
        self.model_runner.cudagraph_manager = manager

    monkeypatch.setattr(parts.worker.Worker, "initialize_from_config", initialize)
    worker.initialize_from_config(None)
    replaced = worker.model_runner.cudagraph_manager
    assert isinstance(replaced, parts.graphs.GraphManager)
    replaced.capture()
    assert replaced.captured == [4, 2, 1]


def test_vllm_takes_the_arguments_for_a_gpu(parts: Any) -> None:
    from medusa_vllm.gpu.arguments import WORKER, gpu_arguments
    from vllm.config import CompilationConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.import_utils import resolve_obj_by_qualname

    arguments = gpu_arguments(Settings(max_concurrency=256), compiled=False)
    compilation = CompilationConfig(**arguments["compilation_config"])
    assert compilation.cudagraph_mode == parts.modes.FULL_DECODE_ONLY
    assert len(compilation.cudagraph_capture_sizes) == 35
    assert set(arguments) <= {field.name for field in dataclasses.fields(EngineArgs)}
    assert resolve_obj_by_qualname(WORKER) is parts.worker.GpuWorker


def test_the_cache_has_the_size_that_the_bundles_graphs_know(worker: Any) -> None:
    from medusa_runtime.state.graphs import Blueprints

    worker.__dict__["_blueprints"] = Blueprints(fingerprint={"kv_cache_bytes": str(5 << 30)})
    assert worker.determine_available_memory() == 5 << 30
    assert worker.cache_config.kv_cache_memory_bytes == 5 << 30
    worker.__dict__["_blueprints"] = Blueprints(fingerprint={"kv_cache_bytes": "many"})
    worker.cache_config.kv_cache_memory_bytes = 4 << 30
    assert worker.determine_available_memory() == 4 << 30


class Bundled:
    def __init__(self, failing: Exception | None = None) -> None:
        self.failing = failing
        self.noted: list[str] = []

    def read(self) -> bytes:
        if self.failing:
            raise self.failing
        return b"no blueprints"

    def quarantine(self, reason: str) -> bool:
        self.noted.append(reason)
        return True


def test_bundles_that_cannot_be_used_are_said_once(
    worker: Any, parts: Any, manager: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from medusa_runtime.errors import StateError

    for failing in (StateError("they broke the device's context before"), None):
        worker.__dict__.pop("_blueprints", None)
        worker.__dict__["_bundled"] = Bundled(failing)
        worker.determine_available_memory()
        made = adopt(parts, manager, worker.restore_graphs)
        made.capture()
        assert made.captured == [4, 2, 1]
        made.captured.clear()
        manager.graphs.clear()
        manager._graphs_captured = False
    lines = [record.message for record in caplog.records if "captured and not restored" in record.message]
    assert len(lines) == 2
    assert "context before" in lines[0]
    assert "expected materialized CUDA graphs" in lines[1]


def test_a_broken_context_is_written_down_and_ends_the_process(
    worker: Any, parts: Any, manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medusa_runtime.errors import DeviceError
    from medusa_runtime.state.graphs import Blueprints
    from medusa_runtime.state.graphs.driver import CudaError

    class Breaking:
        def __init__(self, *_: Any) -> None: ...

        def restore(self, blueprints: Any, **_: Any) -> None:
            raise DeviceError("broke the context") from CudaError("cuGraphLaunch", 700, "an illegal address")

    aborted: list[bool] = []
    monkeypatch.setattr(parts.worker, "VllmGraphState", Breaking)
    monkeypatch.setattr(parts.worker, "CudaDriver", lambda: None)
    monkeypatch.setattr(parts.worker, "abort", lambda: aborted.append(True))
    worker.model_runner = SimpleNamespace()
    worker.__dict__["_blueprints"] = Blueprints()
    worker.__dict__["_bundled"] = bundled = Bundled()
    adopt(parts, manager, worker.restore_graphs).capture()
    assert bundled.noted == ["broke the context"]
    assert aborted == [True]
    worker.__dict__["_bundled"] = None
    with pytest.raises(DeviceError):
        adopt(parts, clean(manager), worker.restore_graphs).capture()


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


def test_what_is_checked_is_restored_by_a_start_and_what_that_leaves_out_has_the_reason(
    worker: Any, parts: Any, manager: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from medusa_runtime.engine.gpu.attempts import Attempts
    from medusa_runtime.state.graphs import Blueprints, GraphMismatch, Reason
    from medusa_runtime.state.graphs.blueprint import GraphBlueprint
    from medusa_vllm.gpu.graph_check import GraphCheck

    class Without:
        def __init__(self, *_: Any) -> None:
            self.verified: set[str] = set()
            self.reasons = {"one": GraphMismatch(Reason.KERNEL_MISSING, "scale")}

        def restore(self, blueprints: Any, *, attempts: Attempts, **_: Any) -> None:
            assert attempts.ended("check") == set()
            raise GraphMismatch(Reason.MEMORY, "expected 2 MiB, found 1 MiB")

    graphs = tuple(GraphBlueprint(key, (), (), b"") for key in ("one", "two"))
    attempts = Attempts(tmp_path / "attempts")
    check = GraphCheck(Blueprints({"kv_cache_bytes": str(5 << 30)}, graphs=graphs), attempts)
    monkeypatch.setattr(parts.worker, "VllmGraphState", Without)
    monkeypatch.setattr(parts.worker, "CudaDriver", lambda: None)
    monkeypatch.setattr(type(worker), "check", check)
    worker.model_runner = SimpleNamespace()
    assert set(check.result().refused.values()) == {"absent: a start with it did not come to restore it"}
    assert worker.determine_available_memory() == 5 << 30
    adopt(parts, manager, worker.restore_graphs).capture()
    assert manager.captured == [4, 2, 1]
    found = check.result()
    assert found.graphs == ()
    assert found.refused == {"one": "kernel-missing: scale", "two": "memory: expected 2 MiB, found 1 MiB"}


def clean(manager: Any) -> Any:
    manager.graphs.clear()
    manager._graphs_captured = False
    return manager


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
