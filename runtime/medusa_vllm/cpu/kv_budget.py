"""Decides how much memory vLLM's KV cache may take: from a recorded plan or the model's shape, and the free memory.

vLLM would run a forward of the largest batch to measure it; this runs none (``state/kv_plan.py`` explains how).
"""

from __future__ import annotations

from typing import Any

from medusa_runtime.config import Settings
from medusa_runtime.container_limits import memory_available_bytes
from medusa_runtime.region.reader import Region
from medusa_runtime.state.kv_plan import Geometry, KvPlan, activation_bytes, plan_kv_cache, recorded_plan


def kv_budget(config: Any, region: Region, settings: Settings) -> KvPlan:
    """Plan the KV cache for a VllmConfig without a KV size. Raises ConfigError when the requested size does not fit."""
    shape = geometry(config)
    return plan_kv_cache(
        shape,
        settings,
        free_bytes=_free_bytes(region, settings) - shape.block_bytes,
        activation_bytes=estimated_activation_bytes(config, region, settings),
        recorded=recorded_plan(region),
    )


def geometry(config: Any) -> Geometry:
    """Describe the caches of all ranks that share this machine's memory as one: each rank has a part of every block."""
    model, block_tokens = config.model_config, config.cache_config.block_size
    block_bytes = block_tokens * token_bytes(config) * _ranks(config)
    return Geometry(block_tokens, block_bytes, (), str(model.dtype).removeprefix("torch."), model.max_model_len)


def estimated_activation_bytes(config: Any, region: Region, settings: Settings) -> int:
    model = config.model_config
    return activation_bytes(
        region.wait_index(),
        hidden=model.get_hidden_size(),
        vocabulary=model.get_vocab_size(),
        item_bytes=model.dtype.itemsize,
        settings=settings,
    )


def cache_bytes(plan: KvPlan, config: Any) -> int:
    """Return the size that vLLM needs for each rank. One of the blocks is padding, which no sequence gets."""
    return (plan.cache_bytes + plan.block_bytes) // _ranks(config)


def _ranks(config: Any) -> int:
    """Return how many ranks share one memory. On GPUs each has its own."""
    return int(config.parallel_config.world_size) if config.device_config.device_type == "cpu" else 1


def token_bytes(config: Any) -> int:
    """Return the KV bytes of one token in all layers of one rank."""
    model, parallel = config.model_config, config.parallel_config
    size = 1 if config.cache_config.cache_dtype.startswith("fp8") else model.dtype.itemsize
    parts = 1 if model.use_mla else 2  # one compressed latent, or keys and values
    return int(parts * model.get_num_kv_heads(parallel) * model.get_head_size() * size * model.get_num_layers(parallel))


def _free_bytes(region: Region, settings: Settings) -> int:
    """Return how many bytes can be allocated once the weights are loaded.

    On a CPU the weights take memory twice: in the region, and again as vLLM packs them. On a GPU they take it once, and
    each rank's part is on its own GPU.
    """
    from vllm.platforms import current_platform

    index, progress = region.wait_index(), region.progress()
    total = sum(shard.data_bytes for shard in index.shards)
    if current_platform.is_cuda():
        import torch

        return int(torch.cuda.mem_get_info()[0]) - total // settings.tensor_parallel
    to_come = total if any(shard.path is not None for shard in index.shards) else total - progress.fetched_bytes
    free = memory_available_bytes() - to_come - total
    if settings.memory_limit_mb is not None:
        free = min(free, (settings.memory_limit_mb << 20) - 2 * total)
    return free


__all__ = ["cache_bytes", "estimated_activation_bytes", "geometry", "kv_budget", "token_bytes"]
