"""vLLM's worker on a GPU (vLLM 0.32): a planned KV cache, restored graphs, every stage on the timeline.

Between loading the weights and the first request, vLLM does some work only to measure it: the largest forward, which
shows the free memory, and captures that it throws away. Both are left out; the free memory is recorded instead (MEDUSA
§6). So is the warm-up that compiles Triton's kernels, if the state bundle has them. A model whose kernels share a
workspace needs both: vLLM lets it grow until graphs are captured, and not afterwards.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from medusa_runtime.config import Settings
from medusa_runtime.device.built_for import check_gpu
from medusa_runtime.engine.gpu.device import BundledGraphs, bundled_graphs, full_gpu, is_full
from medusa_runtime.errors import ConfigError, DeviceError, MedusaError
from medusa_runtime.process import abort
from medusa_runtime.state.graphs import Blueprints, CudaDriver, KernelFinder
from medusa_runtime.state.graphs.blob_format import decode_blueprints
from medusa_runtime.timeline import Timeline
from vllm import envs
from vllm.config import CompilationMode
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu_worker import Worker

from ..compiled.settings import WorkerCompilation
from ..weights.attached import AttachedRegion
from .graph_check import GraphCheck
from .graph_state import KV_BYTES, VllmGraphState, begin_loading
from .graphs import GraphManager, NoTimeline, RestoredDecodeGraphs, context_is_lost
from .recording import Recording, RecordingManager
from .triton_kernels import purpose, restored

logger = logging.getLogger(__name__)

_LEAST_FREE_BYTES = 512 << 20  # for activations; a plan that leaves less is not used
_WITHOUT_WORKSPACE = ("FLASH_ATTN", "TRITON_ATTN")  # backends of attention


class GpuWorker(Worker):  # type: ignore[misc]
    """The ``worker_cls`` for a GPU, an option of vLLM that its documentation offers for this."""

    recording: Recording | None = None  # set offline, in the processes that materialize
    check: GraphCheck | None = None  # set offline, in the process that checks what was materialized
    _graph_state: VllmGraphState | None = None
    _kernels: KernelFinder | None = None  # of the bundle's graphs, being loaded
    _kernels_for: str | None = None  # the purpose of the Triton kernels that were restored

    def init_device(self) -> None:
        capability = current_platform.get_device_capability(self.local_rank)
        if capability is not None:
            check_gpu(current_platform.get_device_name(self.local_rank), capability.as_version_str())
        with self._timeline.stage("device"), _needs_memory("buffers of vLLM"):
            super().init_device()
        if self.recording is not None:
            self.recording.open_pool(CudaDriver())
        self._shift()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        with self._timeline.stage("load"), _needs_memory("weights"):
            super().load_model(load_dummy_weights=load_dummy_weights)
        self._restore_kernels()  # first: loading compiled functions opens Triton's driver, which is code in its cache
        self._compilation.on_model_loaded(self.get_model(), self.vllm_config)
        self._shift()

    def determine_available_memory(self) -> int:
        """Return the planned bytes, if the GPU has them free now. Otherwise vLLM measures, by running a forward."""
        with self._timeline.stage("kv_plan") as detail:
            of_graphs = self._graphs_kv_bytes()
            planned = of_graphs or self.cache_config.kv_cache_memory_bytes
            if planned:
                free = free_bytes(self.device)
                if planned + _LEAST_FREE_BYTES <= free:
                    self.cache_config.kv_cache_memory_bytes = planned
                    detail |= {"bytes": planned, "source": "planned"}
                    if not self._has_no_workspace():
                        with _needs_memory("largest step, in which the kernels' workspace grows"):
                            planned = super().determine_available_memory()
                    if of_graphs and self._blueprints is not None and self.check is None:  # beside all that follows
                        self._kernels = begin_loading(CudaDriver(), self.model_runner, self._blueprints)
                    return int(planned)
                logger.warning(
                    "the KV cache was planned with %d MiB, but %d MiB of the GPU's memory are free; measuring",
                    planned >> 20,
                    free >> 20,
                )
                self.cache_config.kv_cache_memory_bytes = None
            with _needs_memory("largest step, which measures what is left for the KV cache"):
                found = int(super().determine_available_memory())
            if found <= 0:
                raise ConfigError(
                    "the GPU has no memory left for a KV cache beside the weights; use a larger one, or end what else "
                    "runs on it"
                )
            detail |= {"bytes": found, "source": "measured"}
            return found

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        with self._timeline.stage("kv_cache"), _needs_memory("KV cache"):
            super().initialize_from_config(kv_cache_config)
        runner = self.model_runner
        manager = getattr(runner, "cudagraph_manager", None)
        if manager is None or not hasattr(manager, "run_fullgraph"):
            logger.info("CUDA graphs are captured: this model runner of vLLM's has no graph manager")
            return
        if self.recording is not None:
            self._shift()
            self.recording.runner = runner
            runner.cudagraph_manager = RecordingManager.of(manager, self.recording)
        else:
            runner.cudagraph_manager = GraphManager.of(
                manager, self.restore_graphs, self._timeline, self.restore_pieces
            )

    def compile_or_warm_up_model(self) -> Any:
        kernels = self.vllm_config.kernel_config
        with (
            self._timeline.stage("warm_up") as detail,
            _needs_memory("warm-up and the CUDA graphs"),
            self._compilation.without_compiler(),
            _without_collections(),
        ):
            if kernels.enable_jit_warmup and self._has_all_kernels() and self._has_no_workspace():
                detail["compiles"] = kernels.enable_jit_warmup = False
            times = super().compile_or_warm_up_model()
        try:
            self._compilation.on_warmed_up()
        except Exception as error:  # noqa: BLE001 - of pickling, say: the graphs can still be kept
            logger.warning("the compiled code is left out: %s: %s", type(error).__name__, error)
        return times

    def shutdown(self) -> None:
        super().shutdown()
        self._folders.close()

    def restore_graphs(self, manager: GraphManager) -> RestoredDecodeGraphs | None:
        """Restore the graphs that the state bundle has for this model and GPU; None if it has none."""
        blueprints = self._blueprints
        if blueprints is None:
            return None
        self._graph_state = VllmGraphState(CudaDriver(), self.model_runner, manager)  # owns the graphs
        with self._quarantine_on_loss():
            if self.check is not None:
                return self.check.restore(self._graph_state, manager.first_layer)
            return self._graph_state.restore(blueprints, trigger=manager.first_layer, finder=self._kernels)

    def on_failed_step(self, error: Exception) -> None:
        """End this process like a crash if restored graphs have broken the device's context in a step."""
        if self._graph_state is not None and self._graph_state.context_is_lost():
            self._quarantine(error)

    def restore_pieces(self, create_forward: Any) -> Sequence[Any]:
        """Restore the bundle's piecewise graphs, once the compiled functions are there."""
        if self._graph_state is None:
            return []
        with self._quarantine_on_loss():
            return self._graph_state.restore_pieces(create_forward)

    def _restore_kernels(self) -> None:
        try:
            region = AttachedRegion.of(self.load_config).region
        except ConfigError:
            return
        with self._timeline.stage("triton_restore") as detail:
            self._kernels_for = self._folders.enter_context(restored(region))
            detail["found"] = self._kernels_for is not None

    @cached_property
    def _compilation(self) -> WorkerCompilation:
        return WorkerCompilation(self.load_config, self._timeline)

    @cached_property
    def _folders(self) -> ExitStack:
        return ExitStack()

    def _has_all_kernels(self) -> bool:
        """Return whether the bundle's kernels are all that this start needs: it has none for what is not materialized.

        Without a warm-up, the others would be compiled while requests wait.
        """
        config = self.vllm_config
        is_plain = config.lora_config is None and config.speculative_config is None
        if self._kernels_for is None or not is_plain or self.parallel_config.world_size > 1:
            return False
        return self._kernels_for == purpose(config, self.load_config.model_loader_extra_config.get("medusa_flags"))

    def _has_no_workspace(self) -> bool:
        """Return whether all layers are attention by kernels without a workspace; False if that is not certain."""
        config = self.model_config
        if config.is_quantized or config.is_multimodal_model or self.parallel_config.decode_context_parallel_size > 1:
            return False
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        return all(
            type(layer) is Attention and layer.get_attn_backend().get_name() in _WITHOUT_WORKSPACE for layer in layers
        )

    @contextmanager
    def _quarantine_on_loss(self) -> Iterator[None]:
        try:
            yield
        except DeviceError as error:
            if context_is_lost(error):
                self._quarantine(error)
            raise

    def _quarantine(self, error: Exception) -> None:
        """End this process like a crash, so that the zygote forks another engine, which captures the graphs.

        Do nothing if they are not a bundle's, or cannot be quarantined: the next engine would restore them again.
        """
        bundled = self._bundled
        if bundled is not None and bundled.quarantine(str(error)):
            logger.error("a restored CUDA graph broke the device's context; the next engine captures them: %s", error)
            abort()

    @cached_property
    def _blueprints(self) -> Blueprints | None:
        """Return the bundle's graphs, which are read once. If they cannot be used, that is logged once."""
        if self.check is not None:
            return self.check.unchecked
        bundled = self._bundled
        if bundled is None or self.recording is not None:
            return None
        try:
            data = bundled.read()
            return decode_blueprints(data) if data is not None else None
        except (MedusaError, RuntimeError) as error:  # such as for want of threads
            logger.warning("CUDA graphs are captured and not restored: %s", error)
            return None

    @cached_property
    def _bundled(self) -> BundledGraphs | None:
        try:
            attached = AttachedRegion.of(self.load_config)
        except ConfigError:
            return None
        if self.parallel_config.world_size > 1:  # these graphs contain messages between ranks
            return None
        extra = self.load_config.model_loader_extra_config
        settings = Settings(
            model=extra.get("medusa_model"),
            state=extra.get("medusa_state"),
            engine="vllm",
            graphs=extra.get("medusa_graphs", "capture"),
        )
        # Those of a compiled model, which has pieces, have not run on a GPU yet.
        is_eager = self.vllm_config.compilation_config.mode == CompilationMode.NONE
        return bundled_graphs(attached.region, settings, auto_restores=is_eager)

    def _graphs_kv_bytes(self) -> int | None:
        """Return the size of the KV cache with which the bundle's graphs were captured. They fit no other."""
        blueprints = self._blueprints
        found = blueprints.fingerprint.get(KV_BYTES, "") if blueprints is not None else ""
        return int(found) if found.isdigit() else None

    def _shift(self) -> None:
        if self.recording is not None:
            self.recording.shift(self.device)

    @property
    def _timeline(self) -> Timeline | NoTimeline:
        try:
            timeline: Timeline = AttachedRegion.of(self.load_config).timeline
        except ConfigError:  # vLLM was started with this worker, but not by us
            return NoTimeline()
        return timeline


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage in this context. vLLM would do so before and after it captures graphs.

    It would unfreeze all that was imported, which this process shares with the one that it was forked from, and go
    through it twice: half a second. A user may have asked for collections (VLLM_ENABLE_CUDAGRAPH_GC).
    """
    name = "freeze_gc_for_cudagraph_capture"
    if not hasattr(model_runner, name) or getattr(envs, "VLLM_ENABLE_CUDAGRAPH_GC", False):
        yield
        return
    enabled = gc.isenabled()
    gc.disable()
    try:
        with patch.object(model_runner, name, nullcontext):
            yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _needs_memory(what: str) -> Iterator[None]:
    """Raise DeviceError in place of another error if the GPU has too little memory for ``what``."""
    try:
        yield
    except RuntimeError as error:
        if not is_full(error):
            raise
        raise full_gpu(error, f"the {what}") from error


def free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0])


__all__ = ["GpuWorker"]
