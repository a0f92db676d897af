"""The KV plan of the torch engine: the geometry of its cache, and the memory that is free beside the weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ...checkpoint.index import TensorEntry, WeightIndex
from ...config import Settings
from ...container_limits import memory_available_bytes
from ...errors import ConfigError
from ...kernels import cpu, native
from ...kernels.compiled import native_kernels
from ...load.alignment import must_move_from
from ...load.applier import Applier
from ...load.copies import low_address
from ...models import ModelConfig
from ...region.layout import LateFileState
from ...region.reader import Region
from ...state.kv_plan import (
    Geometry,
    KvPlan,
    Least,
    activation_bytes,
    graph_bytes,
    logits_bytes,
    plan_kv_cache,
    recorded_plan,
)
from ...timeline import Timeline
from ..preimport import COMPILED_PRODUCTS_BYTES
from .kv_cache import BLOCK_TOKENS, KvShape, blocks_for

logger = logging.getLogger(__name__)

# What grows after the plan on a CPU: the function's processes, compiled code, the allocator's slack. Measured
# (benchmarks.least_memory).
_LEAST_MARGIN_BYTES = 40 << 20
_STATES_SHARE = 2  # the states of sequences get one in this many of the free bytes
_TOKENIZER_FACTOR = 10  # a tokenizer takes eight to eleven times the memory of its file


def free_bytes(region: Region, index: WeightIndex, settings: Settings, dtype: torch.dtype, applier: Applier) -> int:
    """Return how many bytes can be allocated beside all weights of this region, once ``applier`` has loaded them.

    ``index`` is that of the applier's tensors. All weights count, even where ``--layers`` loads a part: the worker may
    have to load the others later.
    """
    progress = region.progress()
    total = sum(shard.data_bytes for shard in index.shards)
    # Local shards are mapped files. They are page cache, which counts as available memory, so all of it is subtracted.
    # Bytes that were fetched into the region are in use already, so only the missing ones are.
    to_come = total if any(shard.path is not None for shard in index.shards) else total - progress.fetched_bytes
    casts = _made_bytes(index, dtype, applier)
    late_bytes = region.late_bytes(LateFileState.PENDING)
    free = memory_available_bytes() - to_come - late_bytes - casts
    if settings.memory_limit_mb is not None:
        late_bytes += region.late_bytes(LateFileState.PRESENT)
        free = min(free, (settings.memory_limit_mb << 20) - total - late_bytes - casts)
    return free


def _made_bytes(index: WeightIndex, dtype: torch.dtype, applier: Applier) -> int:
    """Return the bytes that are made of tensors: copies in another dtype, another order or at another address, and what
    quantized weights take beside.
    """
    made, plain, quantization = 0, set(index.tensors), applier.quantization
    if quantization is not None:
        from ...load.quantized.tensors import DequantizedIndex

        assert isinstance(index, DequantizedIndex)
        stored = index.stored.keys()
        staying = applier.staying(stored) if isinstance(native_kernels(), native.NativeKernels) else set()
        made = sum(index.made_bytes(name, dtype, keep_codes=name in staying) for name in stored)
        plain -= stored
    own = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]

    def is_copied(name: str, entry: TensorEntry) -> bool:
        if entry.dtype != own or (quantization is not None and quantization.is_changed(name)):
            return True
        return applier.moves_unaligned and must_move_from(low_address(index, entry), dtype, entry.shape)

    copied = (entry for name in plain if is_copied(name, entry := index.tensors[name]))
    return made + sum(math.prod(entry.shape) * dtype.itemsize for entry in copied)


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
    applier: Applier,
    *,
    device_free_bytes: int | None = None,
    layers: int | None = None,
    graph_sizes: Sequence[int] = (),
    previous_kv_tokens: int | None = None,
    states_bytes: int = 0,
) -> KvPlan:
    """Return the state bundle's KV plan if it fits this machine now, else compute one. Raises ConfigError.

    ``device_free_bytes``: for a cache on a GPU, the GPU's free memory beside the weights. ``layers``: how many of the
    model's layers the cache is for; default: all. ``graph_sizes``: the batch sizes that will have a CUDA graph on the
    GPU. ``previous_kv_tokens``: the size of the cache of the engine that this one replaces. ``states_bytes``: what
    sequences' states take on a CPU.
    """
    sizes, index = (
        geometry(KvShape.of(config, dtype, layers), config.max_positions),
        applier.tensors(region).wait_index(),
    )
    if previous_kv_tokens is not None and settings.kv_cache_mb is None:
        cache_bytes = previous_kv_tokens // BLOCK_TOKENS * sizes.block_bytes
        settings = replace(settings, kv_cache_mb=-(-cache_bytes >> 20))
    return plan_kv_cache(
        sizes,
        settings,
        free_bytes=free_bytes(region, index, settings, dtype, applier) - states_bytes
        if device_free_bytes is None
        else device_free_bytes,
        activation_bytes=estimated_activation_bytes(index, config, settings, dtype),
        graph_bytes=graph_bytes(
            len(graph_sizes),
            rows=max(graph_sizes, default=0),
            blocks=blocks_for(settings.max_model_len or config.max_positions),
            vocabulary=config.vocab_size,
            item_bytes=dtype.itemsize,
        ),
        # A record is for all layers.
        recorded=recorded_plan(region) if layers in (None, len(config.attention_layers)) else None,
        least=_least(region, config, settings, sizes.dtype) if device_free_bytes is None else None,
        remedy="give the container more memory"
        if device_free_bytes is None
        else "use a larger GPU, or end what else runs on this one",
    )


def most_states(region: Region, config: ModelConfig, settings: Settings, dtype: torch.dtype, applier: Applier) -> int:
    """Return for how many sequences at a time there is memory for the states of layers without keys and values.

    These get up to half of what is free, and the KV cache the rest. Raises ConfigError if there is none for one.
    """
    free = free_bytes(region, applier.tensors(region).wait_index(), settings, dtype, applier)
    size = config.state_bytes(dtype)
    if size > free:
        raise ConfigError(
            f"the states of one sequence take {size >> 20} MiB: expected as much free memory beside the weights, found "
            f"{max(free, 0) >> 20} MiB; give the container more memory"
        )
    count = free // _STATES_SHARE // size
    if count < settings.max_concurrency:
        logger.warning(
            "memory has room for the states of %d sequences, so %d requests run at a time, not %d",
            *(max(count, 1), max(count, 1), settings.max_concurrency),
        )
    return min(max(count, 1), settings.max_concurrency)


def _least(region: Region, config: ModelConfig, settings: Settings, dtype: str) -> Least:
    """Return what a start on a CPU needs at least. The tokenizer is read beside the plan."""
    tokenizer_bytes = _TOKENIZER_FACTOR * len(region.file("tokenizer.json") or b"")
    products_bytes = COMPILED_PRODUCTS_BYTES if cpu.features() & cpu.FAST_IN_TORCH[dtype] else 0
    return Least(_LEAST_MARGIN_BYTES + tokenizer_bytes + products_bytes, logits_bytes(settings, config.vocab_size))


def previously(timeline: Timeline, name: str) -> int | None:
    """Return a number of the plan of the engine that this one replaces, such as "tokens"; None for the first engine.

    The kernel frees a killed process's memory bit by bit, so little may be free at this moment. A cache that is sized
    by it would stay too small for as long as the instance lives.
    """
    planned = [stage.detail for stage in timeline.stages() if stage.name == "kv_plan" and stage.detail]
    return planned[-1].get(name) if planned else None


def estimated_activation_bytes(index: WeightIndex, config: ModelConfig, settings: Settings, dtype: torch.dtype) -> int:
    """Calculate how many bytes a forward may take beside weights and cache. ``index`` lists the applied tensors."""
    return activation_bytes(
        index,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        item_bytes=dtype.itemsize,
        settings=settings,
    )
