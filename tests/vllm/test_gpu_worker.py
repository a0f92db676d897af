"""What the worker for GPUs does at each stage of a start, as far as a machine without a GPU can show."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import os
import sys
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.errors import DeviceError
from medusa_vllm.gpu import triton_kernels
from vllm_gpu_parts import adopt

pytestmark = pytest.mark.vllm


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


def attention(parts: Any, backend: str = "FLASH_ATTN") -> Any:
    """A layer of attention, made without the configuration that its constructor asks for."""
    made = parts.worker.Attention.__new__(parts.worker.Attention)
    object.__setattr__(made, "get_attn_backend", lambda: SimpleNamespace(get_name=lambda: backend))
    return made


@pytest.fixture
def worker(parts: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = parts.worker.GpuWorker.__new__(parts.worker.GpuWorker)
    made.device = parts.torch.device("cpu")
    made.local_rank = 0
    made.load_config = SimpleNamespace(model_loader_extra_config={})
    made.cache_config = SimpleNamespace(kv_cache_memory_bytes=4 << 30)
    made.model_config = SimpleNamespace(is_quantized=False, is_multimodal_model=False)
    made.parallel_config = SimpleNamespace(world_size=1, decode_context_parallel_size=1)
    made.vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"layers.0": attention(parts)}),
        kernel_config=SimpleNamespace(enable_jit_warmup=True),
        lora_config=None,
        speculative_config=None,
    )
    monkeypatch.setattr(parts.worker, "free_bytes", lambda device: 8 << 30)
    monkeypatch.setattr(parts.worker.Worker, "determine_available_memory", lambda self: 3 << 30)
    return made


def test_a_planned_cache_runs_no_forward(worker: Any, parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts.worker.Worker, "determine_available_memory", lambda self: pytest.fail("it measured"))
    assert worker.determine_available_memory() == 4 << 30


def give_workspace(worker: Any, parts: Any, how: str) -> None:
    """Give the worker's model a part whose kernels may share a workspace."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    if how == "experts":  # vLLM registers them beside attention
        layers["layers.0.mlp.experts"] = object()
    elif how == "backend":
        layers["layers.1"] = attention(parts, "FLASHINFER")
    elif how == "contexts over ranks":  # whose results FlashAttention gathers in the workspace
        worker.parallel_config.decode_context_parallel_size = 2
    else:
        setattr(worker.model_config, how, True)


WITH_WORKSPACE = ("experts", "backend", "contexts over ranks", "is_quantized", "is_multimodal_model")


@pytest.mark.parametrize("how", WITH_WORKSPACE)
def test_a_workspace_has_its_size_before_graphs_are_captured(
    worker: Any, parts: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """vLLM lets no workspace grow after that: a longer prompt would end with an error."""
    planned: list[int] = []

    def largest_step(self: Any) -> int:
        planned.append(self.cache_config.kv_cache_memory_bytes)
        return 4 << 30

    give_workspace(worker, parts, how)
    monkeypatch.setattr(parts.worker.Worker, "determine_available_memory", largest_step)
    assert worker.determine_available_memory() == 4 << 30
    assert planned == [4 << 30], "it did not run, or would measure"


WITH_OTHER_KERNELS = ("ranks", "lora_config", "speculative_config", "flags", "compiled")  # not those materialized


@pytest.mark.parametrize("how", [None, "no kernels", *WITH_WORKSPACE, *WITH_OTHER_KERNELS])
def test_kernels_of_the_bundle_need_no_warm_up(
    worker: Any, parts: Any, monkeypatch: pytest.MonkeyPatch, how: str | None
) -> None:
    compiling: list[bool] = []
    region = SimpleNamespace(has_code=lambda name: how != "no kernels", code=lambda name: kernels)
    kernels = triton_kernels_blob()
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr(triton_kernels, "_NAMED", None)
    flags = "--attention-backend TRITON_ATTN" if how == "flags" else "--attention-backend FLASH_ATTN"
    worker.load_config.model_loader_extra_config["medusa_flags"] = flags
    worker.vllm_config.compilation_config.mode = 3 if how == "compiled" else 0
    monkeypatch.setattr(parts.worker, "AttachedRegion", SimpleNamespace(of=lambda config: attached))
    attached = SimpleNamespace(region=region, timeline=parts.graphs.NoTimeline())
    monkeypatch.setattr(parts.worker.GpuWorker, "_bundled", None)
    monkeypatch.setattr(
        parts.worker.Worker,
        "compile_or_warm_up_model",
        lambda self: compiling.append(self.vllm_config.kernel_config.enable_jit_warmup),
    )
    monkeypatch.setattr(parts.worker.Worker, "shutdown", lambda self: None)
    if how in WITH_WORKSPACE:
        give_workspace(worker, parts, str(how))
    elif how == "ranks":
        worker.parallel_config.world_size = 2
    elif how in ("lora_config", "speculative_config"):
        setattr(worker.vllm_config, str(how), object())
    monkeypatch.setattr(parts.worker.Worker, "load_model", lambda self, load_dummy_weights: None)
    worker.model_runner = SimpleNamespace(get_model=lambda: None)
    worker.load_model()
    worker.determine_available_memory()
    worker.compile_or_warm_up_model()
    assert compiling == [how is not None]
    folder = os.environ.get("TRITON_CACHE_DIR")
    assert (folder is None) == (how == "no kernels")
    worker.shutdown()
    assert folder is None or not Path(folder).exists()


def triton_kernels_blob() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("triton-1/KEY/add.cubin", b"code")
        archive.writestr("triton-1/made-for", "0 --attention-backend FLASH_ATTN")
    return data.getvalue()


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


@pytest.mark.parametrize("how", ["compiled", "not compiled", "cannot be saved"])
def test_what_the_first_offline_start_compiles_is_kept(
    worker: Any, parts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Compiled:
        def save_compiled_function(self, path: str) -> None:
            if how == "cannot be saved":
                raise TypeError("cannot pickle it")
            Path(path).write_bytes(b"code")

    model = parts.torch.nn.Sequential(parts.torch.nn.Identity())

    def warm_up(self: Any) -> str:
        model[0].aot_compiled_fn = None if how == "not compiled" else Compiled()
        return "times"

    worker.load_config.model_loader_extra_config = {"medusa_capture": str(tmp_path), "medusa_compile_key": "KEY"}
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    monkeypatch.setattr(parts.worker.Worker, "load_model", lambda self, load_dummy_weights: None)
    monkeypatch.setattr(parts.worker.Worker, "compile_or_warm_up_model", warm_up)
    worker.load_model()
    assert worker.compile_or_warm_up_model() == "times"
    found = tmp_path / "index.json"
    if how == "compiled":
        assert json.loads(found.read_text()) == {"modules": ["0"], "config": "KEY"}
        assert (tmp_path / "0.aot").read_bytes() == b"code"
    else:
        assert not found.exists()
        assert "the compiled code is left out" in caplog.text, "the graphs would be lost, too"


def test_a_start_collects_no_garbage_while_graphs_are_made(
    worker: Any, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would unfreeze all that the process has in common with the one that it was forked from."""
    from vllm.v1.worker.gpu import model_runner

    seen: list[tuple[bool, int]] = []

    def warm_up(self: Any) -> None:
        with model_runner.freeze_gc_for_cudagraph_capture():
            seen.append((gc.isenabled(), gc.get_freeze_count()))

    worker.load_config.model_loader_extra_config = {}
    monkeypatch.setattr(parts.worker.Worker, "compile_or_warm_up_model", warm_up)
    original = model_runner.freeze_gc_for_cudagraph_capture
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        worker.compile_or_warm_up_model()
        assert seen == [(False, frozen)]
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()
    assert gc.isenabled()
    assert model_runner.freeze_gc_for_cudagraph_capture is original
    monkeypatch.setenv("VLLM_ENABLE_CUDAGRAPH_GC", "1")
    worker.compile_or_warm_up_model()
    assert seen[1:] == [(True, 0)]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_model_whose_code_is_attached_prepares_no_compiler(
    worker: Any, parts: Any, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    from medusa_runtime.errors import StateError
    from medusa_vllm.compiled import settings
    from vllm.compilation import compiler_interface

    prepared: list[Any] = []

    def attach(*_: Any) -> int:
        if damaged:
            raise StateError("damaged")
        return 1

    def warm_up(self: Any) -> None:
        from vllm.compilation.compiler_interface import trigger_inductor_lazy_init

        trigger_inductor_lazy_init("cuda")

    worker.load_config.model_loader_extra_config = {"medusa_compiled": "blob", "medusa_compile": "1"}
    worker.model_runner = SimpleNamespace(get_model=lambda: None)
    monkeypatch.setattr(settings, "_attach", attach)
    monkeypatch.setattr(compiler_interface, "trigger_inductor_lazy_init", prepared.append)
    monkeypatch.setattr(parts.worker.Worker, "load_model", lambda self, load_dummy_weights: None)
    monkeypatch.setattr(parts.worker.Worker, "compile_or_warm_up_model", warm_up)
    worker.load_model()
    worker.compile_or_warm_up_model()
    assert prepared == (["cuda"] if damaged else [])


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


def test_the_cache_has_the_size_that_the_bundles_graphs_know(
    worker: Any, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then their kernels are loaded from here on, and else the graphs fit nowhere."""
    from medusa_runtime.state.graphs import Blueprints

    loading: list[Any] = []
    monkeypatch.setattr(parts.worker, "CudaDriver", lambda: "driver")
    monkeypatch.setattr(parts.worker, "begin_loading", lambda *given: loading.append(given))
    worker.model_runner = "runner"
    made = Blueprints(fingerprint={"kv_cache_bytes": str(5 << 30)})
    worker.__dict__["_blueprints"] = made
    assert worker.determine_available_memory() == 5 << 30
    assert worker.cache_config.kv_cache_memory_bytes == 5 << 30
    assert loading == [("driver", "runner", made)]
    worker.__dict__["_blueprints"] = Blueprints(fingerprint={"kv_cache_bytes": "many"})
    worker.cache_config.kv_cache_memory_bytes = 4 << 30
    assert worker.determine_available_memory() == 4 << 30
    assert len(loading) == 1


@pytest.mark.parametrize(
    ("given", "compiled", "used"),
    [
        ("auto", False, True),
        ("auto", True, False),
        ("restore", True, True),
        ("capture", False, False),
        (None, False, False),
    ],
)
def test_by_default_only_graphs_of_a_model_without_pieces_are_restored(
    worker: Any, parts: Any, monkeypatch: pytest.MonkeyPatch, given: str | None, compiled: bool, used: bool
) -> None:
    region = SimpleNamespace(has_code=lambda name: True, from_agent=False)
    worker.load_config.model_loader_extra_config = {"medusa_graphs": given} if given else {}
    worker.parallel_config = SimpleNamespace(world_size=1)
    worker.vllm_config.compilation_config.mode = parts.worker.CompilationMode(3 if compiled else 0)
    attached = SimpleNamespace(region=region)
    monkeypatch.setattr(parts.worker, "AttachedRegion", SimpleNamespace(of=lambda config: attached))
    assert (worker._bundled is not None) == used


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

    monkeypatch.setattr(parts.worker, "VllmGraphState", Breaking)
    monkeypatch.setattr(parts.worker, "CudaDriver", lambda: None)
    monkeypatch.setattr(parts.worker, "abort", partial(sys.exit, "like a crash"))
    worker.model_runner = SimpleNamespace()
    worker.__dict__["_blueprints"] = Blueprints()
    worker.__dict__["_bundled"] = bundled = Bundled()
    with pytest.raises(SystemExit, match="like a crash"):
        adopt(parts, manager, worker.restore_graphs).capture()
    assert bundled.noted == ["broke the context"]
    worker.__dict__["_bundled"] = None
    with pytest.raises(DeviceError):
        adopt(parts, clean(manager), worker.restore_graphs).capture()


def clean(manager: Any) -> Any:
    manager.graphs.clear()
    manager._graphs_captured = False
    return manager


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
