"""LoRA adapters (Hu et al., 2021): the products that they add to those of a model's linear layers.

A layer computes the base model's product for all rows of a step. Each adapter then adds its own low-rank product to the
rows of its sequences. So one step serves several adapters and the base model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from medusa_runtime.kernels import small_linear


class Pair(NamedTuple):
    """An adapter's matrices for one layer: ``a`` [rank, in], already scaled, and ``b`` [out, rank].

    The ``a`` of layers with the same input are parts of one matrix, ``together``; this layer's begins at row ``start``.
    """

    a: Tensor
    b: Tensor
    together: Tensor | None = None
    start: int = 0


Pairs = Mapping[str, Pair]  # an adapter's matrices, by the layer's name in the model


class AdapterStep:
    """The adapters of the running step. All layers of a model share this object.

    ``groups`` has each adapter's matrices and the rows of its sequences among the step's ``tokens``. ``misfits``
    collects the names of layers whose input did not have exactly these tokens, so that nothing could be added.
    """

    def __init__(self) -> None:
        self.groups: Sequence[tuple[Pairs, slice]] = ()
        self.tokens = 0
        self.misfits: set[str] = set()


class AdaptedLayer(NamedTuple):
    """What a linear layer needs for adapters: its name in their ``Pairs``, and the running step."""

    name: str
    step: AdapterStep


def add_adapters(x: Tensor, outs: Sequence[Tensor], layers: Sequence[AdaptedLayer | None]) -> None:
    """Add the products of the step's adapters with x [..., in] to ``outs`` [..., out], the layers' own products.

    ``layers`` has an entry for each of ``outs``. It is None for a layer without an adapter; not all may be None.
    """
    step = next(layer.step for layer in layers if layer is not None)
    x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if x.shape[0] != step.tokens:
        step.misfits.update(layer.name for layer in layers if layer is not None)
        return
    for pairs, rows in step.groups:
        part, together = x[rows], None
        for out, layer in zip(outs, layers, strict=True):
            pair = None if layer is None else pairs.get(layer.name)
            if pair is None:
                continue
            if pair.together is None:
                low = small_linear(part, pair.a)
            else:
                together = small_linear(part, pair.together) if together is None else together
                low = together[:, pair.start : pair.start + pair.a.shape[0]]
            whole = out if out.dim() == 2 else out.view(-1, out.shape[-1])
            whole[rows].add_(small_linear(low, pair.b))  # += would also copy the rows onto themselves


__all__ = ["AdaptedLayer", "AdapterStep", "Pair", "Pairs", "add_adapters"]
