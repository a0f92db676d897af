"""LoRA (Hu et al., 2021) beside the layers of a model: what a step's adapters add to the products of its linear layers.

A layer computes the base's product for all rows of a step. Each adapter then adds its own low-rank product to the rows
of its sequences, so that one step serves several adapters and the base model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from medusa_runtime.kernels import small_linear


class Pair(NamedTuple):
    """An adapter's matrices for one layer: ``a`` [rank, in], already scaled, and ``b`` [out, rank].

    Layers that multiply the same input have their ``a`` in one matrix, ``together``, this one's from row ``start`` on.
    """

    a: Tensor
    b: Tensor
    together: Tensor | None = None
    start: int = 0


Pairs = Mapping[str, Pair]  # by the layer's name in the model


class AdapterStep:
    """The adapters of the step that runs, each with the rows of its sequences among the step's ``tokens``.

    ``misfits`` are the names of layers that were not given all of these tokens, so that nothing could be added.
    """

    def __init__(self) -> None:
        self.groups: Sequence[tuple[Pairs, slice]] = ()
        self.tokens = 0
        self.misfits: set[str] = set()


class AdaptedLayer(NamedTuple):
    """A linear layer that some adapter changes: the name under which adapters have their matrices for it."""

    name: str
    step: AdapterStep


def add_adapters(x: Tensor, outs: Sequence[Tensor], layers: Sequence[AdaptedLayer | None]) -> None:
    """Add what the step's adapters make of x [..., in] to each of ``outs`` [..., out], the layers' own products."""
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
            whole[rows].add_(small_linear(low, pair.b))  # += would copy the rows onto themselves, too


__all__ = ["AdaptedLayer", "AdapterStep", "Pair", "Pairs", "add_adapters"]
