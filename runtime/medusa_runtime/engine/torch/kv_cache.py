"""The paged KV cache (PagedAttention, Kwon et al. 2023, section 4.3): a pool of blocks that sequences share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ... import kernels
from ...models import ModelConfig
from .block_pool import BlockPool
from .recurrent_states import RecurrentStates

BLOCK_TOKENS = 16
SPARE_BLOCKS = 16
KV_CACHE = "KV cache"  # the name of its memory on a device

Memory = Callable[[str, int], Tensor]  # (name, size in bytes) → uint8 [size or more] on a device, uninitialized


class KvShape(NamedTuple):
    """The shape and dtype of the keys, and of the values, that one token leaves in the cache."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, layers: int | None = None) -> KvShape:
        """Return the shape for a model's cache, for all layers that have keys and values or for a number of them."""
        return cls(layers or len(config.attention_layers), config.num_kv_heads, config.head_dim, dtype)

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class KvCache:
    """The keys and values of all sequences: ``pool`` [layers, 2, blocks, 16, kv_heads, head_dim], keys first.

    The pool is never cleared, so a page of it takes no memory until it is first written.

    ``memory`` places the pool on a device. It then begins with ``SPARE_BLOCKS`` additional blocks, numbered from
    ``spare`` on, which belong to no sequence: padding is written there. They come first, so that a graph's reference
    inputs do not depend on the number of blocks.

    ``numbers`` are those that the pool's layers have in the model, by default 0, 1 and so on. ``states`` are what other
    layers keep of a sequence.
    """

    def __init__(
        self,
        shape: KvShape,
        blocks: int,
        memory: Memory | None = None,
        *,
        numbers: Sequence[int] | None = None,
        states: RecurrentStates | None = None,
    ) -> None:
        self.shape = shape
        self.states = states
        numbers = range(shape.layers) if numbers is None else numbers
        self.first_layer = numbers[0]
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
        self.layers = {number: (layer[0], layer[1]) for number, layer in zip(numbers, self.pool, strict=True)}
        self.slots = {number: (k.flatten(0, 1), v.flatten(0, 1)) for number, (k, v) in self.layers.items()}

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v [tokens, kv_heads, head_dim] to ``slots`` [tokens] (block x 16 + place in the block)."""
        kernels.write_kv(*self.slots[layer], slots, k, v)


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
