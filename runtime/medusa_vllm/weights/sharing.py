"""Lets parameters that vLLM would fill with a copy of one whole tensor become that tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_LEAST_BYTES = 64 << 10


@contextmanager
def share_weights(model: nn.Module) -> Iterator[None]:
    """Let parameters on the CPU take the tensor itself in this context, if their loader only copies.

    A linear layer's weights are repacked after loading, so a copy would be thrown away. This applies only to loaders
    that are known to copy: others compute (``-exp(x)``) and keep something else than they are given.
    """
    known = _copying_loaders()
    wrapped: list[tuple[Any, Any]] = []
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        large = parameter.numel() * parameter.element_size() >= _LEAST_BYTES
        if large and parameter.device.type == "cpu" and callable(loader) and getattr(loader, "__func__", None) in known:
            wrapped.append((parameter, loader))
            parameter.weight_loader = _sharing_loader(loader)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter, loader in wrapped:
            parameter.weight_loader = loader


def _copying_loaders() -> frozenset[Callable[..., Any]]:
    from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    kinds = (ColumnParallelLinear, ReplicatedLinear, RowParallelLinear, VocabParallelEmbedding)
    names = ("weight_loader", "weight_loader_v2")
    return frozenset(function for kind in kinds for name in names if (function := vars(kind).get(name)))


def _sharing_loader(loader: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(loader)
    def load(parameter: nn.Parameter, loaded: Tensor, *args: Any, **kwargs: Any) -> Any:
        same = loaded.shape == parameter.shape and loaded.dtype == parameter.dtype and loaded.is_contiguous()
        if args or kwargs or not same:
            return loader(parameter, loaded, *args, **kwargs)
        parameter.data = loaded
        return None

    return load
