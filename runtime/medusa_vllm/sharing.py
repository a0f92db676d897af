"""Parameters that vLLM fills with the whole of one tensor: they become that tensor, instead of a copy of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_LEAST_BYTES = 64 << 10


@contextmanager
def share(model: nn.Module) -> Iterator[None]:
    """In this context parameters on the CPU whose loader only copies take the tensor itself.

    A linear layer's weights are repacked after loading, so a copy would be made to be thrown away. Only loaders that
    are known to copy: others compute (``-exp(x)``), and what they are given is not what they keep.
    """
    known = _copying_loaders()
    wrapped: list[tuple[Any, Any]] = []
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        large = parameter.numel() * parameter.element_size() >= _LEAST_BYTES
        if large and parameter.device.type == "cpu" and callable(loader) and getattr(loader, "__func__", None) in known:
            wrapped.append((parameter, loader))
            parameter.weight_loader = _sharing(loader)  # type: ignore[attr-defined]
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


def _sharing(loader: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(loader)
    def load(parameter: nn.Parameter, loaded: Tensor, *args: Any, **kwargs: Any) -> Any:
        same = loaded.shape == parameter.shape and loaded.dtype == parameter.dtype and loaded.is_contiguous()
        if args or kwargs or not same:
            return loader(parameter, loaded, *args, **kwargs)
        parameter.data = loaded
        return None

    return load
