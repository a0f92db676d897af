"""Kernels for a GPU, where torch's own operations are not the fastest or cannot be captured."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from medusa_runtime.kernels.pointwise import write_kv

logger = logging.getLogger(__name__)


@functools.cache
def triton_obstacle() -> str | None:
    """Return why the triton kernels cannot be used here; None if triton is installed.

    It is not imported, which would take a tenth of a second. An engine that restores all of its graphs never needs it.
    """
    return "triton is not installed" if importlib.util.find_spec("triton") is None else None


def _paged_triton() -> ModuleType | None:
    return _imported() if triton_obstacle() is None else None


@functools.cache
def _imported() -> ModuleType | None:
    try:
        from medusa_runtime.kernels import paged_triton
    except ImportError as error:
        logger.warning(
            "decode steps run without triton's kernels and CUDA graphs: triton cannot be imported (%s); reinstall it",
            error,
        )
        return None
    return paged_triton


def paged_decode(
    q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, contexts: Tensor, *, scale: float, window: int | None
) -> Tensor:
    """Return attention of one new token per sequence.

    It is computed by ``paged_triton.decode``, or without triton by a product per sequence.
    """
    if (kernels := _paged_triton()) is not None:
        attended: Tensor = kernels.decode(q, keys, values, block_tables, contexts, scale=scale, window=window)
        return attended
    from medusa_runtime.kernels import paged

    rows = torch.arange(len(q), dtype=torch.int32, device=q.device)
    return paged.attention(q, keys, values, block_tables, rows, contexts, scale=scale, window=window)


def write_decode_kv(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write the keys and values that ``paged_decode`` reads; see ``paged_triton.write``.

    For captured steps only: a prefill should not wait for triton.
    """
    if (kernels := _paged_triton()) is not None:
        kernels.write(keys, values, slots, k, v)
    else:
        write_kv(keys, values, slots, k, v)


def concatenated_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one tensor with the rows of all, without a copy; None if they are not adjacent in one allocation."""
    first = tensors[0]
    if not first.is_contiguous():
        return None
    end, rows = first.data_ptr(), 0
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.dtype is not first.dtype or tensor.shape[1:] != first.shape[1:]:
            return None
        if not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += tensor.nbytes
        rows += tensor.shape[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def fused_weights(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None] | None:
    """Return the weight and bias of one product that does the work of several; None if they are not adjacent."""
    weight = concatenated_view(weights)
    if weight is None:
        return None
    given = [bias for bias in biases if bias is not None]
    if not given:
        return weight, None
    bias = concatenated_view(given) if len(given) == len(biases) else None
    return None if bias is None else (weight, bias)
