"""The paged KV cache (PagedAttention, Kwon et al. 2023, section 4.3): one pool of blocks, lent to sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ... import kernels
from ...models import ModelConfig
from .block_pool import BlockPool

BLOCK_TOKENS = 16
SPARE_BLOCKS = 16
KV_CACHE = "KV cache"  # the name of its memory

Memory = Callable[[str, int], Tensor]  # a name and a size in bytes → uint8 of a device, with whatever was in it


class KvShape(NamedTuple):
    """What one token leaves behind in each layer."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, layers: int | None = None) -> KvShape:
        """The shape for all layers of a model, or for so many of them."""
        return cls(layers or config.num_layers, config.num_kv_heads, config.head_dim, dtype)

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class KvCache:
    """Keys and values of all sequences: ``pool`` [layers, 2, blocks, 16, kv_heads, head_dim], keys first.

    The pool is never cleared, so a page of it costs memory only when it is first written. ``memory`` places it on a
    device; there it has ``SPARE_BLOCKS`` more, from ``spare`` on, that are no sequence's: padding is written there.
    They are the first ones, so that a graph's reference inputs are the same whatever the number of blocks.
    ``first_layer`` is the model's number of the pool's first layer, in a worker that holds a range of them.
    """

    def __init__(self, shape: KvShape, blocks: int, memory: Memory | None = None, *, first_layer: int = 0) -> None:
        self.shape = shape
        self.first_layer = first_layer
        self.spare = 0
        spares = 0 if memory is None else SPARE_BLOCKS
        self.blocks = BlockPool(blocks, spares)
        total = blocks + spares
        sizes = (shape.layers, 2, total, BLOCK_TOKENS, shape.kv_heads, shape.head_dim)
        if memory is None:
            self.pool = torch.empty(sizes, dtype=shape.dtype)
        else:
            size_bytes = total * shape.block_bytes
            self.pool = memory(KV_CACHE, size_bytes)[:size_bytes].view(shape.dtype).view(sizes)
        self.layers = {number: (layer[0], layer[1]) for number, layer in enumerate(self.pool, first_layer)}
        self.slots = {number: (k.flatten(0, 1), v.flatten(0, 1)) for number, (k, v) in self.layers.items()}

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k and v [tokens, kv_heads, head_dim] into ``slots`` [tokens] (block x 16 + place in the block)."""
        kernels.write_kv(*self.slots[layer], slots, k, v)


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
