"""vLLM's configuration, made from ours: one model, from a region, in this process."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from medusa_runtime.config import Settings
from medusa_runtime.errors import ConfigError, DeviceError, MedusaError, ModelError, WeightsError
from medusa_runtime.region.reader import Region
from medusa_runtime.state.kv_plan import KvPlan
from medusa_runtime.timeline import Timeline

from .compiled.settings import CompiledStart
from .cpu.kv_budget import cache_bytes, kv_budget
from .gpu.arguments import bundle_arguments, gpu_arguments, warn_of_unused_flags
from .imports import import_model, keep_log_levels
from .lean_imports import import_real_modules
from .plugin import LOAD_FORMAT
from .serving.lean_server import lean_server
from .structured import TokenizerFolder
from .weights.attached import loader_config

_CPU_WORKER = "medusa_vllm.cpu.worker.CpuWorker"
_PLACEHOLDER_BYTES = 1 << 30


class Configuration(NamedTuple):
    """A VllmConfig that has the KV cache's size, with its KV plan and the arguments of EngineArgs it was made from."""

    config: Any
    plan: KvPlan
    arguments: dict[str, Any]


def configure(
    files: TokenizerFolder, region: Region, settings: Settings, timeline: Timeline, compiled: CompiledStart
) -> Configuration:
    """Return vLLM's configuration. Raises ModelError or ConfigError if vLLM cannot serve the model so configured."""
    architectures = files.folder.config["architectures"]  # checked by models/backend.py
    with timeline.stage("config"):
        for architecture in architectures:
            import_model(str(architecture))
        arguments = _arguments(files, region, settings, timeline, compiled)
        if _parses_reasoning(arguments):
            with lean_server(), keep_log_levels():  # a parser may be a class that a lean import has left empty
                import_real_modules()
        config = create(arguments)
    with timeline.stage("kv_plan") as detail:
        budget = kv_budget(config, region, settings)
        if budget.max_model_len < config.model_config.max_model_len:
            config = create(arguments | {"max_model_len": budget.max_model_len})
        config.cache_config.kv_cache_memory_bytes = cache_bytes(budget, config)
        detail |= {"tokens": budget.tokens, "source": budget.source}
    return Configuration(config, budget, arguments)


def _arguments(
    files: TokenizerFolder, region: Region, settings: Settings, timeline: Timeline, compiled: CompiledStart
) -> dict[str, Any]:
    """Return the arguments: what a region needs comes first, then the user's flags, then our settings."""
    from vllm.platforms import current_platform

    from .flags import MEDIA_DOMAINS, flag_words
    from .serving.arguments import engine_arguments

    if current_platform.is_unspecified():  # vLLM cannot even read its flags then
        raise DeviceError(
            "--engine vllm: this vLLM was built for GPUs, expected one, found none; give the container a GPU, take the "
            "cpu image (vllm-cpu), or --engine torch"
        )
    arguments: dict[str, Any] = {
        "dtype": _dtype(files.folder.config, settings),
        "max_num_seqs": settings.max_concurrency,
        "max_num_batched_tokens": max(settings.max_batched_tokens, settings.max_concurrency),
        "enforce_eager": not compiled.wanted,
        "language_model_only": True,
        "allowed_media_domains": MEDIA_DOMAINS,
        "seed": 0,
    }
    if settings.max_model_len is not None:
        arguments["max_model_len"] = settings.max_model_len
    if settings.prefix_cache_mb == 0:
        arguments["enable_prefix_caching"] = False
    flags = engine_arguments(flag_words(settings))
    arguments |= flags
    # Text is tokenized here, by tokenizer.json. But for pictures, the core needs a processor, which reads its own files
    # and the tokenizer's; and for reasoning, vLLM's configuration reads the ids of the tags.
    tokenizes = _parses_reasoning(arguments) or not arguments["language_model_only"]
    arguments |= {
        "model": str(files.path() if tokenizes else files.folder.path),
        "skip_tokenizer_init": not tokenizes,
        "generation_config": "vllm",  # without the checkpoint's sampling defaults; eos.py reads which tokens end a text
        "load_format": LOAD_FORMAT,
        "model_loader_extra_config": loader_config(region, timeline, settings)
        | bundle_arguments(settings)
        | compiled.extra,
        "kv_cache_memory_bytes": _PLACEHOLDER_BYTES,
        "tensor_parallel_size": settings.tensor_parallel,
        "distributed_executor_backend": _executor(settings),
        "disable_log_stats": bool(flags.get("disable_log_stats")),
    }
    if current_platform.is_cpu():
        arguments["worker_cls"] = _CPU_WORKER
    elif current_platform.is_cuda():
        warn_of_unused_flags(flags)
        arguments |= gpu_arguments(settings, compiled=compiled.wanted)
    if arguments["distributed_executor_backend"] == "mp":
        os.environ.setdefault("VLLM_RPC_BASE_PATH", str(files.path()))  # else a killed engine's sockets stay in /tmp
    return arguments


def _parses_reasoning(arguments: dict[str, Any]) -> bool:
    return bool(arguments.get("reasoning_parser") or arguments.get("reasoning_config"))


def create(arguments: dict[str, Any]) -> Any:
    """Return the VllmConfig for arguments of vLLM's EngineArgs. Raises ModelError, WeightsError or ConfigError."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        return EngineArgs(**arguments).create_engine_config()
    except MedusaError:
        raise
    except (ValueError, TypeError, NotImplementedError, OSError, KeyError, AttributeError) as error:
        raise _as_medusa_error(error) from error
    except Exception as error:
        if not type(error).__name__.startswith("StrictDataclass"):  # what huggingface_hub raises for a config.json
            raise
        raise WeightsError(f"config.json cannot be used: {error.__cause__ or error}") from error


def _executor(settings: Settings) -> Any:
    from vllm.platforms import current_platform

    if settings.tensor_parallel > 1:
        if not current_platform.is_cpu():
            return "mp"
        from .cpu.ranks import RanksExecutor
        from .cpu.shares import VARIABLE, cpu_shares

        os.environ.setdefault(VARIABLE, cpu_shares(settings))
        return RanksExecutor
    from .executor import OneProcessExecutor

    return OneProcessExecutor


def _dtype(config: dict[str, Any], settings: Settings) -> str:
    """Return the dtype: for ``auto`` the checkpoint's own, because vLLM's auto would reduce float32 to 16 bits."""
    if settings.dtype != "auto":
        return settings.dtype
    named = config.get("dtype") or config.get("torch_dtype")
    return "float32" if named == "float32" else "auto"


def _as_medusa_error(error: Exception) -> MedusaError:
    """Return vLLM's reason, without the text that pydantic puts around it."""
    lines = [line.strip() for line in str(error).splitlines()]
    reason = next((line for line in lines if line.startswith(("Value error, ", "Assertion failed, "))), None)
    text = reason.split(", ", 1)[1].partition(" [type=")[0] if reason else " ".join(lines)
    kind = ModelError if "architecture" in text or "quantization" in text else ConfigError
    return kind(f"vLLM cannot serve this model: {text}")


__all__ = ["Configuration", "configure", "create"]
