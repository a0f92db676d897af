"""Imports what an engine needs of vLLM's 3,000 modules, before the model is known."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

from medusa_runtime.config import Settings
from medusa_runtime.region.reader import Region

from .cpu.amx import request_amx_tiles
from .flags import MEDIA_ENVIRONMENT
from .lean_imports import avoid_cache_folder, import_those_there, lean_imports, without_torch_compile
from .plugin import name_plugin, register
from .version import check_version, is_for_gpus, is_tested

logger = logging.getLogger(__name__)

# Variables that vLLM reads, most of them once. One that a user has set stays.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process: no second import, no socket in between
    "VLLM_CONFIGURE_LOGGING": "0",  # the command line configures logging
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    **MEDIA_ENVIRONMENT,
    "HF_HUB_OFFLINE": "1",  # everything comes from the checkpoint, nothing from the network
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # each worker warns that its memory is bound to the only NUMA node there is
}
# With one of these, a user decides how vLLM keeps what it compiles.
_CACHE_VARIABLES = ("VLLM_USE_STANDALONE_COMPILE", "VLLM_USE_AOT_COMPILE", "VLLM_DISABLE_COMPILE_CACHE")
_MODULES = (
    "vllm",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.core.sched.scheduler",
    "vllm.model_executor.models.llama",
    "transformers.models.auto.configuration_auto",
    "tokenizers",
)
_CPU_MODULES = ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn", "medusa_vllm.cpu.worker")
# Nothing of a CPU's: importing vLLM's worker for CPUs replaces torch's streams and events by ones that do nothing.
_GPU_MODULES = ("vllm.v1.worker.gpu_worker", "medusa_vllm.gpu.worker")
# What each start on a GPU imports, whatever the model: the kinds of attention among which vLLM chooses, and what its
# warm-up looks for. Some of them use torch.compile, so they are imported while it works. Not all can be imported.
_GPU_LATE_MODULES = (
    *(f"vllm.v1.attention.backends.{name}_attn" for name in ("flash", "triton", "turboquant")),
    "vllm.v1.attention.backends.flex_attention",
    "vllm.v1.worker.gpu.model_states.default",
    "vllm.model_executor.warmup.minimax_m3_msa_warmup",
    "vllm.model_executor.models.qwen3_vl",
)
# vLLM's HTTP server. A cold process imports it after the first token.
_SERVER_MODULES = (
    "uvicorn",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.launchers.app",
    "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.v1.engine.async_llm",
    "vllm.renderers.hf",
)
_OURS = tuple(f"medusa_vllm.{name}" for name in ("executor", "weights.loader"))
# What an engine imports when it is opened. A process that waits for its model has it before.
_ENGINE_MODULES = (
    *(f"medusa_vllm.{name}" for name in ("engine", "serving.core", "serving.front_end", "serving.lean_server")),
    *(f"medusa_vllm.{name}" for name in ("compiled.compilations", "serving.mounting", "weights.checkpoint_folder")),
    "medusa_runtime.models.backend",
)
_VLLM_ENGINE_MODULES = (
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.v1.pool.flash_maxsim",
    "vllm.entrypoints.serve.utils.fingerprint",
)


def preimport(settings: Settings, region: Region | None = None) -> None:
    """Import all that a start needs, and the model's module if the region already has the model's configuration.

    This is for a process that will only fork: it touches no device and leaves no thread. Raises MissingPackageError,
    ConfigError and ImportError.
    """
    check_version()
    set_variables()
    # vLLM warns about settings that we choose on purpose. This may be the second call, after that of a snapshot.
    logging.getLogger("vllm").setLevel(logging.NOTSET if settings.log_level == "debug" else logging.ERROR)
    # A process that waits for its model has time to import everything.
    lean = region is not None and settings.compile != "always" and is_tested()
    with lean_imports() if lean else nullcontext(), without_torch_compile(), avoid_cache_folder(), keep_log_levels():
        _import_all()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        request_amx_tiles()
    else:
        with avoid_cache_folder(), keep_log_levels():
            import_those_there(_GPU_LATE_MODULES)
    _register_kernels()
    register()
    if settings.compile == "always" or region is None:
        from .compiled.imports import import_compiled

        # A process that waits also has time to import what a compiled model needs.
        import_compiled(on_gpu=not current_platform.is_cpu())
    if region is None:
        with keep_log_levels():
            for module in _ENGINE_MODULES:
                importlib.import_module(module)
            import_those_there(_VLLM_ENGINE_MODULES)
            _import_server()
    if region is not None and region.progress().state != "empty":
        for architecture in _architectures(region):
            import_model(architecture)


def set_variables() -> None:
    """Set the variables that vLLM reads, except those that a user has set, which only get this plugin's name."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    name_plugin(os.environ)
    renew_offline_mode()
    if not is_for_gpus():
        return
    if importlib.util.find_spec("flashinfer") is None:  # vLLM imports it to find out that it samples without
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if not any(name in os.environ for name in _CACHE_VARIABLES):
        # Compiled functions bring all of Inductor's work: the default from torch 2.12.
        os.environ.setdefault("VLLM_USE_MEGA_AOT_ARTIFACT", "1")


def renew_offline_mode() -> None:
    """Let huggingface_hub, if it has been imported, be offline if the environment says so now."""
    if constants := sys.modules.get("huggingface_hub.constants"):
        wanted = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
        constants.HF_HUB_OFFLINE = wanted.upper() in ("1", "ON", "YES", "TRUE")  # type: ignore[attr-defined]


def _import_all() -> None:
    from .serving.fail_fast import fail_fast_in_collections

    fail_fast_in_collections()  # before the first of vLLM's models of requests is built
    for module in _MODULES:
        importlib.import_module(module)
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    with ExitStack() as beside:
        if not on_cpu:
            from .gpu.triton_kernels import key_read_beside

            beside.enter_context(key_read_beside())
        for module in (*_OURS, *(_CPU_MODULES if on_cpu else _GPU_MODULES)):
            importlib.import_module(module)


@cache
def _register_kernels() -> None:
    """Replace Triton's kernels by vLLM's own for CPUs, once: it touches every name of every module."""
    from vllm.platforms import current_platform

    if register_kernels := getattr(current_platform, "register_triton_kernel_overrides", None):  # from 0.31 on
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some names are deprecated
            register_kernels()


def _import_server() -> None:
    """Import vLLM's HTTP server and make its app, which imports the rest and fills Python's caches of types."""
    try:
        for module in _SERVER_MODULES:
            importlib.import_module(module)
        import uvicorn

        from .serving.prebuilt import fill_caches, prebuild_app, quiet_uvicorn

        app = prebuild_app(("generate",))
        quiet_uvicorn()
        uvicorn.Config(app, log_config=None, ws="none").load()
        fill_caches()
    except Exception as error:  # noqa: BLE001 - a model can be served without it, by our own routes
        logger.warning("vLLM's HTTP server cannot be imported: %s: %s", type(error).__name__, error)


def server_is_imported() -> bool:
    """Return whether this process, or the one that it was forked from, has imported vLLM's HTTP server."""
    return all(module in sys.modules for module in _SERVER_MODULES)


@contextmanager
def keep_log_levels() -> Iterator[None]:
    """Keep the levels of the root logger and of its handlers over the imports in this context.

    vLLM brings model_hosting_container_standards, whose import sets them to ERROR: our own lines would be lost.
    """
    found: list[Any] = [logging.getLogger(), *logging.getLogger().handlers]
    levels = [(what, what.level) for what in found]
    try:
        yield
    finally:
        for what, level in levels:
            if what.level != level:  # setting a level goes through all loggers
                what.setLevel(level)


def import_model(architecture: str) -> None:
    """Import a model's module and register its class, so that vLLM does not start a process to look at it.

    An architecture that vLLM does not know is ignored: vLLM's own message follows.
    """
    from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel

    known = ModelRegistry.models.get(architecture)
    if isinstance(known, _LazyRegisteredModel):
        ModelRegistry.register_model(architecture, known.load_model_cls())


def _architectures(region: Region) -> Iterator[str]:
    try:
        named = json.loads(region.file("config.json") or b"{}").get("architectures")
    except (ValueError, AttributeError):
        return  # reported when the config is read
    for name in named if isinstance(named, list) else ():
        if isinstance(name, str):
            yield name
