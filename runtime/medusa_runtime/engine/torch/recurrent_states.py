"""What layers without keys and values keep of each sequence: a state of a fixed size, in a slot of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from ...models.base import Recurrence
from .block_pool import BlockPool


class RecurrentStates:
    """The states of up to ``count`` sequences, which ``slots`` hands out.

    Their memory is never cleared, so a page of it takes none until it is first written: a sequence's first step takes
    its state for zeros.
    """

    def __init__(self, recurrence: Recurrence, dtype: torch.dtype, count: int) -> None:
        self.slots = BlockPool(count)
        sizes = (len(recurrence.layers), count)
        inputs = torch.empty((*sizes, recurrence.taps - 1, recurrence.channels), dtype=dtype)
        matrices = torch.empty((*sizes, recurrence.heads, recurrence.key_dim, recurrence.value_dim))
        self.inputs: dict[int, Tensor] = dict(zip(recurrence.layers, inputs, strict=True))
        self.matrices: dict[int, Tensor] = dict(zip(recurrence.layers, matrices, strict=True))


__all__ = ["RecurrentStates"]
