"""vLLM's configuration for a pipeline, and the identity on which its workers must agree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from medusa_runtime import kernels
from medusa_runtime.checkpoint.order import layer_numbers
from medusa_runtime.config import Settings
from medusa_runtime.errors import ConfigError
from medusa_runtime.models.layer_range import LayerRange
from medusa_runtime.region.reader import Region
from medusa_runtime.state.kv_plan import KvPlan
from medusa_runtime.timeline import Timeline
from medusa_vllm.configuration import create
from medusa_vllm.version import installed_version
from medusa_vllm.weights.attached import layers_config, loader_config

from ..identity import model_digest
from ..plan import GroupPlan

_PARTITION = "VLLM_PP_LAYER_PARTITION"


@dataclass(frozen=True, slots=True)
class RankConfig:
    """One worker's part of a pipeline: its configuration of vLLM, its layers, and its identity for the greeting."""

    config: Any
    layers: LayerRange
    identity: dict[str, Any]


def layers_of(region: Region, settings: Settings) -> LayerRange:
    """Return the layers in ``--layers``. Raises ConfigError without it, or if the model does not have them."""
    if settings.layers is None:
        raise ConfigError("--engine vllm-group needs --layers (MEDUSA_LAYERS): the layers that this worker holds")
    count = max(layer_numbers(region.wait_index().order).values(), default=-1) + 1
    return LayerRange.parse(settings.layers, count)


def rank_config(
    whole: Any,
    arguments: dict[str, Any],
    layers: LayerRange,
    plan: GroupPlan,
    budget: KvPlan,
    region: Region,
    settings: Settings,
    timeline: Timeline,
) -> RankConfig:
    """Return this worker's part of a pipeline.

    ``whole`` is vLLM's configuration for an instance, made of ``arguments``. ``budget`` is the memory for the KV cache.
    Raises ModelError or ConfigError for a model that vLLM does not split.
    """
    from .executor import GroupExecutor

    if whole.parallel_config.tensor_parallel_size > 1:
        raise ConfigError("a group of vLLM's workers takes no --tensor-parallel; expected one process for each worker")
    extra = loader_config(region, timeline, settings) | layers_config(layers.start, layers.stop)
    model = whole.model_config
    with partition(layers, plan):
        config = create(
            arguments
            | {
                "pipeline_parallel_size": plan.size,
                "distributed_executor_backend": GroupExecutor,
                "model_loader_extra_config": extra,  # without compiled code, which is for the whole model
                "enforce_eager": True,
                "max_model_len": model.max_model_len,
            }
        )
    blocks = budget.cache_bytes // budget.block_bytes + 1  # vLLM keeps one as padding
    part = layers.stop - layers.start
    config.cache_config.kv_cache_memory_bytes = -(-blocks * budget.block_bytes * part // layers.total)
    identity = {
        "model": model_digest(region.wait_index()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kernels": _kernels(settings),
        "torch": torch.__version__,
        "vllm": installed_version(),
        "limits": [
            model.max_model_len,
            config.scheduler_config.max_num_batched_tokens,
            config.scheduler_config.max_num_seqs,
        ],
        "total": layers.total,
        "size": plan.size,
        "layers": [layers.start, layers.stop],
        "blocks": blocks,
    }
    return RankConfig(config, layers, identity)


@contextmanager
def partition(layers: LayerRange, plan: GroupPlan) -> Iterator[None]:
    """Set this worker's layers for vLLM while the block runs. vLLM needs only the number of layers before and after."""
    parts = [0] * plan.size
    parts[plan.rank] = layers.stop - layers.start
    if plan.rank:
        parts[0] = layers.start
    if plan.rank < plan.size - 1:
        parts[-1] = layers.total - layers.stop
    before = os.environ.get(_PARTITION)
    os.environ[_PARTITION] = ",".join(map(str, parts))
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARTITION]
        else:
            os.environ[_PARTITION] = before


def _kernels(settings: Settings) -> str:
    found = kernels.describe() | {"setting": settings.kernels}
    return ", ".join(f"{name}: {value}" for name, value in sorted(found.items()))


__all__ = ["RankConfig", "layers_of", "partition", "rank_config"]
