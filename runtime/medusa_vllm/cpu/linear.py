"""vLLM's linear layers on a CPU without 16-bit products: computed from the checkpoint's own bytes by our kernels.

On such a CPU, vLLM copies the whole model, packed for oneDNN, and multiplies in fp32, which takes two and a half times
as long as our kernels. With a layer's ``quant_method``, vLLM lets others decide how a weight is kept and multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from medusa_runtime import kernels
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

_KINDS = (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear)
_Loader = Callable[..., Any]


def use_stored_weights(model: nn.Module) -> int:
    """Let a model's layers multiply with our kernels, and return how many do.

    Call it before the weights are loaded, for an eager engine. A layer that is quantized, not 16 bits wide, or of the
    model's own class stays as it is.
    """
    count = 0
    for layer in model.modules():
        method: Any = None
        if type(layer) in _KINDS and type(layer.quant_method) is UnquantizedLinearMethod:
            method = None if getattr(layer, "_cpu_skip_gemm_dispatch", False) else StoredLinear
        elif type(layer) is ParallelLMHead and type(layer.quant_method) is UnquantizedEmbeddingMethod:
            method = StoredHead
        if method is not None and kernels.has_native_products(cast(Tensor, layer.weight).dtype):
            layer.quant_method = method(layer)
            count += 1
    return count


class StoredLinear(UnquantizedLinearMethod):  # type: ignore[misc]
    """The ``quant_method`` of one layer. Parts of a fused layer stay where they are, and one product uses them."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weights: tuple[Tensor, ...] = ()
        self._rows: list[int] = []
        self._parts: dict[Hashable, Tensor] = {}
        self._ids = _part_ids(layer)
        if self._ids:
            self._load: _Loader = layer.weight.weight_loader
            layer.weight.weight_loader = self._load_part

    def _load_part(self, parameter: nn.Parameter, loaded: Tensor, shard_id: Hashable = None) -> None:
        """The weight loader of a fused layer: it keeps whole parts, and lets vLLM copy others."""
        rows = self._ids.get(shard_id)
        whole = rows is not None and loaded.shape == (rows, parameter.shape[1]) and loaded.is_contiguous()
        if whole and loaded.dtype == parameter.dtype:
            self._parts[shard_id] = loaded
        else:
            self._load(parameter, loaded, *(() if shard_id is None else (shard_id,)))

    def process_weights_after_loading(self, layer: Any) -> None:
        if self._ids and len(self._parts) == len(self._ids):
            self.weights = tuple(self._parts[shard_id] for shard_id in self._ids)
        else:
            for shard_id, part in self._parts.items():
                self._load(layer.weight, part, shard_id)
            self.weights = (layer.weight.data,)
        self._parts = {}
        self._rows = [weight.shape[0] for weight in self.weights]
        # vLLM does the same after packing a weight. A fused layer's weight was never written, so it took no memory.
        layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        none = (None,) * len(self._rows)
        biases = none if bias is None else torch.split_with_sizes(bias, self._rows)
        return kernels.concatenated_linear(x, self.weights, biases)


class StoredHead(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """The ``quant_method`` of the last layer, whose weight may be the embedding's."""

    def __init__(self, layer: Any) -> None:
        super().__init__()

    def process_weights_after_loading(self, layer: Any) -> None:
        pass

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return kernels.linear(x, layer.weight, bias)


def _part_ids(layer: Any) -> dict[Hashable, int]:
    """Return vLLM's name and the rows of each part of a fused layer, in order, if the layer has all of its rows."""
    if layer.tp_size > 1 or not isinstance(layer, MergedColumnParallelLinear | QKVParallelLinear):
        return {}
    names: tuple[Hashable, ...] = ("q", "k", "v")
    if isinstance(layer, MergedColumnParallelLinear):
        names = tuple(range(len(layer.output_sizes)))
    return dict(zip(names, layer.output_sizes, strict=True))


__all__ = ["use_stored_weights"]
