"""How large the KV cache may be, and how long a sequence in it."""

from __future__ import annotations

import logging
import math
from typing import NamedTuple

import torch

from ..config import Settings
from ..errors import ConfigError
from ..limits import memory_available_bytes
from ..weights.index import TensorEntry
from ..weights.region import Region
from .kv_cache import BLOCK_TOKENS, KvShape, blocks_for

logger = logging.getLogger(__name__)

_MARGIN_BYTES = 256 << 20  # for activations, the allocator's slack and the other processes of the instance
_USED_SHARE = 0.9


def free_bytes(region: Region, settings: Settings, dtype: torch.dtype) -> int:
    """What can be allocated once the weights of this region are there."""
    index, progress = region.wait_index(), region.progress()
    total = sum(shard.data_bytes for shard in index.shards)
    # Mapped files are page cache, which counts as free but is needed; what was fetched into the region does not.
    to_come = total if any(shard.path is not None for shard in index.shards) else total - progress.fetched_bytes
    casts = sum(_cast_bytes(entry, dtype) for entry in index.tensors.values())
    free = memory_available_bytes() - to_come - casts
    if settings.memory_limit_mb is not None:
        free = min(free, (settings.memory_limit_mb << 20) - total - casts)
    return free


def _cast_bytes(entry: TensorEntry, dtype: torch.dtype) -> int:
    """The memory of a tensor's copy in another dtype; none when it is used as it is."""
    name = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    return 0 if entry.dtype == name else math.prod(entry.shape) * dtype.itemsize


class KvSize(NamedTuple):
    blocks: int
    max_model_len: int

    @property
    def tokens(self) -> int:
        return self.blocks * BLOCK_TOKENS


def kv_size(shape: KvShape, settings: Settings, *, max_positions: int, free_bytes: int) -> KvSize:
    """What max_concurrency sequences of full length need, or what there is room for, whichever is less.

    ``free_bytes`` is what can be allocated once the weights are there. Raises ConfigError when no sequence of a
    length that was asked for fits.
    """
    wanted_len = settings.max_model_len or max_positions
    if wanted_len > max_positions:
        raise ConfigError(
            f"max_model_len={wanted_len} cannot be used: expected at most {max_positions}, the positions this model has"
        )
    wanted = blocks_for(wanted_len) * settings.max_concurrency
    if settings.kv_cache_mb is not None:
        room_bytes = settings.kv_cache_mb << 20
    else:
        room_bytes = int(max(free_bytes - _MARGIN_BYTES, 0) * _USED_SHARE)
    blocks = min(wanted, room_bytes // shape.block_bytes)
    tokens = blocks * BLOCK_TOKENS
    least = wanted_len if settings.max_model_len else min(wanted_len, BLOCK_TOKENS)
    if tokens < least:
        raise ConfigError(
            f"the KV cache has room for {tokens} tokens ({room_bytes >> 20} MiB), but one sequence needs {least} "
            f"({-(-blocks_for(least) * shape.block_bytes >> 20)} MiB); lower --max-model-len, raise --kv-cache-mb, "
            f"or give the container more memory"
        )
    if tokens < wanted_len:
        logger.warning(
            "the KV cache has room for %d tokens, so max_model_len is %d, not %d", tokens, tokens, wanted_len
        )
    return KvSize(blocks, min(wanted_len, tokens))
