"""States of a fixed size that layers keep of each sequence, beside keys and values, in a slot of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...models.base import StateShape
from .block_pool import BlockPool


class RecurrentStates:
    """The states of up to ``count`` sequences, which ``slots`` hands out; ``layers`` has those of each layer.

    Each is [slots, sizes of its shape]. The memory is never cleared, so a page of it takes none until it is first
    written: a sequence's first step takes its state for zeros.
    """

    def __init__(self, shapes: Sequence[Sequence[StateShape]], dtype: torch.dtype, count: int) -> None:
        """Make the states of each layer's ``shapes``, with ``dtype`` for those that have none."""
        self.slots = BlockPool(count)
        self.layers: list[list[Tensor]] = [
            [torch.empty(count, *shape.sizes, dtype=shape.dtype or dtype) for shape in layer] for layer in shapes
        ]


__all__ = ["RecurrentStates"]
