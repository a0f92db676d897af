"""How much memory vLLM's KV cache may take, from the model's shape and the machine as it is now: no forward is run.

ParaServe §7: sizes follow from the layer count and the activations' shapes. vLLM itself profiles a largest batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...config import Settings
from ...errors import ConfigError
from ...limits import memory_available_bytes
from ...weights.region import Region
from .gpu_arguments import free_bytes

_MARGIN_BYTES = 256 << 20  # for the allocator's slack and the other processes of the instance
_USED_SHARE = 0.9
_LIVE_ACTIVATIONS = 6  # of a token, in hidden sizes, that are alive at the same time


class KvBudget(NamedTuple):
    """``size_bytes`` for the cache, in which a sequence of ``max_model_len`` tokens fits."""

    size_bytes: int
    max_model_len: int
    block_bytes: int
    block_tokens: int

    @property
    def tokens(self) -> int:
        return self.size_bytes // self.block_bytes * self.block_tokens


def kv_budget(config: Any, region: Region, settings: Settings) -> KvBudget:
    """For a VllmConfig whose KV size is not set yet. Raises ConfigError when what was asked for does not fit."""
    model, block_tokens = config.model_config, config.cache_config.block_size
    block_bytes = block_tokens * token_bytes(config)
    wanted_len = model.max_model_len
    wanted = -(-wanted_len // block_tokens) * settings.max_concurrency
    if settings.kv_cache_mb is not None:
        room = settings.kv_cache_mb << 20
    else:
        room = int(max(_free_bytes(config, region, settings) - _MARGIN_BYTES, 0) * _USED_SHARE)
    # vLLM keeps one block for padding, which no sequence gets.
    blocks = min(wanted + 1, room // block_bytes)
    tokens = max(blocks - 1, 0) * block_tokens
    least = wanted_len if settings.max_model_len else min(wanted_len, block_tokens)
    if tokens < least:
        needed = (-(-least // block_tokens) + 1) * block_bytes
        raise ConfigError(
            f"the KV cache has room for {tokens} tokens ({room >> 20} MiB), but one sequence needs {least} "
            f"({-(-needed >> 20)} MiB); lower --max-model-len, raise --kv-cache-mb, or give the container more memory"
        )
    return KvBudget(blocks * block_bytes, min(wanted_len, tokens), block_bytes, block_tokens)


def token_bytes(config: Any) -> int:
    """KV bytes of one token in all layers of one rank."""
    model, parallel = config.model_config, config.parallel_config
    heads = model.get_num_kv_heads(parallel)
    size = 1 if config.cache_config.cache_dtype.startswith("fp8") else model.dtype.itemsize
    parts = 1 if model.use_mla else 2  # a compressed latent, or keys and values
    return int(parts * heads * model.get_head_size() * size * model.get_num_layers(parallel))


def activation_bytes(config: Any) -> int:
    """What the largest step needs beside weights and cache: its tokens' hidden states, its sequences' logits."""
    model, scheduler = config.model_config, config.scheduler_config
    text = model.hf_text_config
    width = _LIVE_ACTIVATIONS * model.get_hidden_size() + 3 * (getattr(text, "intermediate_size", None) or 0)
    logits = 3 * 4 * model.get_vocab_size()  # float32: logits, their log-softmax, a sorted copy
    return int(scheduler.max_num_batched_tokens * width * model.dtype.itemsize + scheduler.max_num_seqs * logits)


def _free_bytes(config: Any, region: Region, settings: Settings) -> int:
    """What can be allocated once the weights are there: in the region, and once more as vLLM packs them."""
    index, progress = region.wait_index(), region.progress()
    total = sum(shard.data_bytes for shard in index.shards)
    to_come = total if any(shard.path is not None for shard in index.shards) else total - progress.fetched_bytes
    if config.device_config.device_type == "cuda":
        return free_bytes() - total - activation_bytes(config)
    free = memory_available_bytes() - to_come - total
    if settings.memory_limit_mb is not None:
        free = min(free, (settings.memory_limit_mb << 20) - 2 * total)
    return free - activation_bytes(config)


__all__ = ["KvBudget", "activation_bytes", "kv_budget", "token_bytes"]
