"""Reads an adapter's region into matrices for a model's layers, and checks every name, shape and value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...checkpoint.adapter import ADAPTER_CONFIG, AdapterConfig, adapted_modules, matrix, matrix_names
from ...errors import MismatchError
from ...load.views import DTYPES, Views
from ...models.base import DecoderModel
from ...models.layers.linear import Linear
from ...models.layers.lora import Pair
from ...region.reader import Region


class AdapterWeights(NamedTuple):
    """An adapter's matrices, and the layers that they change. The keys of both are the model's names of the layers."""

    pairs: dict[str, Pair]
    layers: dict[str, Linear]
    size_bytes: int


class _AdaptedModule(NamedTuple):
    module: str  # as the adapter names it
    name: str  # as the model names it
    layer: Linear


def read_adapter(region: Region, model: DecoderModel, dtype: torch.dtype, *, most_rank: int) -> AdapterWeights:
    """Wait for the adapter in ``region``, and return its matrices as ``dtype``.

    Raises MismatchError if the adapter does not fit the model, has a rank above ``most_rank`` or is not supported;
    CorruptError; and the error of a failed fetch.
    """
    index = region.wait_index()
    config = AdapterConfig.read(region.file(ADAPTER_CONFIG))
    if getattr(model, "gathers", False):
        raise MismatchError(
            f"expected a model that runs with the engine's own attention, found {model.config.architecture}, whose "
            "steps are taken apart; merge the adapter into the base model instead"
        )
    found = {name: _layer(model, name) for name in adapted_modules(config, index.tensors)}
    views = Views(region)
    # Training rewrites an adapter's file, and a mapped file that is truncated kills the process (SIGBUS).
    copies = any(shard.path is not None for shard in index.shards)

    def value(name: str, shape: tuple[int, int]) -> Tensor:
        entry = matrix(index.tensors, name, shape)
        region.wait_tensor(name)
        numbers = views.tensor(name, entry)
        if not bool(torch.isfinite(numbers).all()):
            raise MismatchError(f"{name}: expected finite numbers, found infinity or NaN")
        assert DTYPES[entry.dtype] is numbers.dtype
        return numbers

    pairs: dict[str, Pair] = {}
    for module, name, layer in found.values():
        rank = config.rank_of(module)
        if rank > most_rank:
            raise MismatchError(f"{module}: expected a rank of at most {most_rank} (--max-lora-rank), found {rank}")
        out_features, in_features = layer.weight.shape
        names = matrix_names(module)
        a, b = value(names[0], (rank, in_features)), value(names[1], (out_features, rank))
        pairs[name] = Pair((a.float() * config.scale_of(module)).to(dtype), b.to(dtype, copy=copies))
    _join_a_matrices(model, pairs)
    size_bytes = sum(pair.a.nbytes + pair.b.nbytes for pair in pairs.values())
    return AdapterWeights(pairs, {name: layer for _, name, layer in found.values()}, size_bytes)


def _layer(model: DecoderModel, module: str) -> _AdaptedModule:
    """Find the model's layer for a module of the adapter. Raises MismatchError unless it is linear, in the decoder."""
    renamed = model.rename(f"{module}.weight") or ""
    name = renamed.removesuffix(".weight")
    try:
        layer = model.get_submodule(name) if renamed.endswith(".weight") else None
    except AttributeError:
        layer = None
    parts = name.split(".")
    if not isinstance(layer, Linear) or not any(part.isdigit() for part in parts) or "experts" in parts:
        known = sorted({name.rpartition(".")[2] for name in adaptable(model)})
        raise MismatchError(
            f"expected matrices for linear layers of the decoder ({', '.join(known) or 'this model has none'}), found "
            f"some for {module[:200]!a}"
        )
    return _AdaptedModule(module, name, layer)


def adaptable(model: DecoderModel) -> Iterator[str]:
    """Yield the names of the layers that an adapter may change."""
    for name, layer in model.named_modules():
        parts = name.split(".")
        if isinstance(layer, Linear) and any(part.isdigit() for part in parts) and "experts" not in parts:
            yield name


def _join_a_matrices(model: DecoderModel, pairs: dict[str, Pair]) -> None:
    """Join the A matrices of layers with the same input, so that one product serves them all."""
    for name, module in model.named_modules():
        for group in getattr(module, "FUSED", ()):
            names = [full for part in group if (full := f"{name}.{part}") in pairs]
            if len(names) < 2:
                continue
            together = torch.cat([pairs[full].a for full in names])
            start = 0
            for full in names:
                rank = pairs[full].a.shape[0]
                pairs[full] = Pair(together[start : start + rank], pairs[full].b, together, start)
                start += rank


__all__ = ["AdapterWeights", "read_adapter"]
