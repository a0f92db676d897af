"""The layers that sentence-transformers puts behind the pooling, as in EmbeddingGemma and LaBSE."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from medusa_runtime.errors import ModelError
from medusa_runtime.load.applier import Applier
from medusa_runtime.load.skeleton import skeleton
from medusa_runtime.models.layers.linear import Linear
from medusa_runtime.models.sentences import DenseSettings


class DenseLayers(nn.Module):
    """Turns pooled vectors, float32 [texts, hidden], into vectors [texts, ``size``]. Without layers, they stay."""

    def __init__(self, layers: Sequence[DenseSettings], hidden_size: int) -> None:
        """Raises ModelError for a layer that does not take what the one before it gives."""
        super().__init__()
        self.size = hidden_size
        self._keys: dict[str, str] = {}
        self.layers = nn.ModuleDict()
        for number, layer in enumerate(layers):
            if layer.in_features != self.size:
                raise ModelError(f"{layer.path}: expected in_features to be {self.size}, found {layer.in_features}")
            with skeleton():
                linear = Linear(layer.in_features, layer.out_features, bias=layer.bias)
            key = f"{number}" if "." in layer.path or layer.path in self._keys else layer.path
            self._keys[layer.path] = key
            self.layers[key] = nn.Sequential(OrderedDict(linear=linear, activation=getattr(nn, layer.activation)()))
            self.size = layer.out_features
        self.eval()

    def forward(self, vectors: Tensor) -> Tensor:
        for layer in self.layers.values():
            vectors = layer(vectors)
        return vectors

    def applier(self) -> Applier:
        """Return the applier that fills the layers from a region."""
        return Applier(self, dtype=torch.float32)

    def rename(self, name: str) -> str | None:
        path, _, own = name.rpartition("/")
        key = self._keys.get(path)
        return None if key is None else f"layers.{key}.{own}"


__all__ = ["DenseLayers"]
