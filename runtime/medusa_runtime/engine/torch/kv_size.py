"""The KV plan of the torch engine: its cache's geometry, and what is free beside the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ...checkpoint.index import TensorEntry, WeightIndex
from ...config import Settings
from ...limits import memory_available_bytes
from ...models import ModelConfig
from ...region.reader import Region
from ...state.kv_plan import Geometry, KvPlan, activation_bytes, graph_bytes, plan, recorded_in
from ...timeline import Timeline
from .kv_cache import BLOCK_TOKENS, KvShape, blocks_for


def free_bytes(region: Region, settings: Settings, config: ModelConfig, dtype: torch.dtype) -> int:
    """Return what can be allocated once the weights of this region are there, all of them:

    a worker may come to hold them.
    """
    index, progress = weights(region, config, dtype), region.progress()
    total = sum(shard.data_bytes for shard in index.shards)
    # Mapped files are page cache, which counts as free but is needed; what was fetched into the region does not.
    to_come = total if any(shard.path is not None for shard in index.shards) else total - progress.fetched_bytes
    stored = region.wait_index().tensors
    casts = sum(_cast_bytes(entry, dtype, entry is not stored.get(name)) for name, entry in index.tensors.items())
    free = memory_available_bytes() - to_come - casts
    if settings.memory_limit_mb is not None:
        free = min(free, (settings.memory_limit_mb << 20) - total - casts)
    return free


def weights(region: Region, config: ModelConfig, dtype: torch.dtype) -> WeightIndex:
    """The index of a checkpoint's weights in the shapes in which they are used."""
    index = region.wait_index()
    if config.quantization is None:
        return index
    from ...load.quantized.source import QuantizedIndex

    return QuantizedIndex(index, config.quantization, dtype)


def _cast_bytes(entry: TensorEntry, dtype: torch.dtype, made: bool) -> int:
    """The memory of a tensor's copy in another dtype, or of one that is ``made``; none when it is used as it is."""
    name = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    return 0 if entry.dtype == name and not made else math.prod(entry.shape) * dtype.itemsize


def geometry(shape: KvShape, max_positions: int) -> Geometry:
    axes = ("layers", "keys and values", "blocks", "tokens", "kv_heads", "head_dim")
    lengths = (shape.layers, 2, 0, BLOCK_TOKENS, shape.kv_heads, shape.head_dim)
    dtype = str(shape.dtype).removeprefix("torch.")
    return Geometry(BLOCK_TOKENS, shape.block_bytes, tuple(zip(axes, lengths, strict=True)), dtype, max_positions)


def kv_plan(
    region: Region,
    config: ModelConfig,
    settings: Settings,
    dtype: torch.dtype,
    *,
    device_free_bytes: int | None = None,
    layers: int | None = None,
    graph_sizes: Sequence[int] = (),
    tokens_before: int | None = None,
) -> KvPlan:
    """The plan that the state bundle holds, where it fits this machine now; else one computed. Raises ConfigError.

    ``device_free_bytes``: what a GPU has free beside the weights, where the cache lies on one. ``layers``: how many of
    the model's layers the cache is for; default: all. ``graph_sizes``: the batch sizes that will have a CUDA graph on
    the GPU. ``tokens_before``: the size of this instance's cache until now.
    """
    sizes = geometry(KvShape.of(config, dtype, layers), config.max_positions)
    if tokens_before is not None and settings.kv_cache_mb is None:
        cache_bytes = tokens_before // BLOCK_TOKENS * sizes.block_bytes
        settings = replace(settings, kv_cache_mb=-(-cache_bytes >> 20))
    return plan(
        sizes,
        settings,
        free_bytes=free_bytes(region, settings, config, dtype) if device_free_bytes is None else device_free_bytes,
        activation_bytes=activations(region, config, settings, dtype),
        graph_bytes=graph_bytes(
            len(graph_sizes),
            rows=max(graph_sizes, default=0),
            blocks=blocks_for(settings.max_model_len or config.max_positions),
            vocabulary=config.vocab_size,
            item_bytes=dtype.itemsize,
        ),
        recorded=recorded_in(region),
    )


def tokens_before(timeline: Timeline) -> int | None:
    """The size of the cache of the engine that this one replaces; None for the first one.

    The memory of a process that the kernel has killed comes back bit by bit, so what is free now says little. A cache
    made for it would be small as long as the instance lives.
    """
    planned = [stage.detail["tokens"] for stage in timeline.stages() if stage.name == "kv_plan" and stage.detail]
    return planned[-1] if planned else None


def activations(region: Region, config: ModelConfig, settings: Settings, dtype: torch.dtype) -> int:
    """Return what a forward may take beside weights and cache, calculated."""
    return activation_bytes(
        weights(region, config, dtype),
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        item_bytes=dtype.itemsize,
        settings=settings,
    )
