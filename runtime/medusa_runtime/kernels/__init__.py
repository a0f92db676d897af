"""The heavy steps of a forward pass on a CPU, as fast as its memory allows.

``linear`` is F.linear for 16-bit weights that stay where they are (read-only, shared, unpacked). torch's own product is
slow on x86 CPUs without 16-bit dot products; there a compiled kernel does it, or, uncompiled, fp32 slices.
``paged_attention`` reads keys and values where the paged cache has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_runtime.kernels import cpu, native, paged, upcast

__all__ = ["describe", "linear", "paged_attention"]

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class _Path(NamedTuple):
    product: Product | None  # None: F.linear
    reason: str  # for describe()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., depth] @ weight [cols, depth]^T + bias [cols] → [..., cols], accumulated in fp32 and rounded once.

    The same as F.linear, and that itself where it is the fastest: other dtypes, other devices, gradients.
    """
    dtype = weight.dtype
    if dtype is not torch.bfloat16 and dtype is not torch.float16:
        return F.linear(x, weight, bias)
    product = _path(dtype).product
    if product is None or not _plain(x, weight) or (bias is not None and not _plain_bias(bias, weight)):
        return F.linear(x, weight, bias)
    if x.dim() == 2:
        return product(x, weight, bias)
    return product(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
    contexts: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention of new tokens over a paged KV cache (PagedAttention, Kwon et al. 2023, section 4.1).

    q [tokens, heads, head_dim], any mix of prefill and decode, a sequence's tokens side by side; keys and values
    [blocks, block_size, kv_heads, head_dim], those of the new tokens already in place; block_tables int32
    [sequences, max_blocks]; sequences int32 [tokens], a token's row of block_tables; contexts int32 [tokens], how many
    tokens of its sequence a token sees, itself included (position + 1); window, how many of those it sees at most.
    Gives [tokens, heads, head_dim]. Blocks that no token sees are not read.
    """
    kernels = _kernels()
    indices = (block_tables, sequences, contexts)
    if (
        isinstance(kernels, native.NativeKernels)
        and q.is_cpu
        and q.dtype in native.DTYPES
        and q.dtype is keys.dtype is values.dtype
        and q.shape[2] <= native.MAX_HEAD_DIM
        and q.shape[2] % 16 == 0
        and q.stride()[1:] == (q.shape[2], 1)
        and keys.stride(3) == values.stride(3) == 1
        and all(index.dtype is torch.int32 and index.stride()[-1] == 1 for index in indices)
        and not torch.is_grad_enabled()
    ):
        return kernels.attention(q, keys, values, *indices, scale=scale, window=window)
    return paged.attention(q, keys, values, *indices, scale=scale, window=window)


def describe() -> dict[str, str]:
    """For each 16-bit dtype: which way its products take on this machine, and why; and the way of attention."""
    kernels = _kernels()
    attention = f"torch: {kernels}" if isinstance(kernels, str) else "native"
    return {name: _path(getattr(torch, name)).reason for name in cpu.FAST_IN_TORCH} | {"attention": attention}


def _plain(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels can take these; what is wrong with others F.linear says."""
    if not (x.is_cpu and weight.is_cpu and x.dtype is weight.dtype):
        return False
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return False
    shape, weight_shape = x.shape, weight.shape
    return (
        len(weight_shape) == 2
        and len(shape) > 0
        and shape[-1] == weight_shape[1]
        and x.stride()[-1] == weight.stride()[1] == 1
        and x.numel() > 0
        and weight.numel() > 0
    )


def _plain_bias(bias: Tensor, weight: Tensor) -> bool:
    return bias.is_cpu and bias.dtype is weight.dtype and bias.is_contiguous() and bias.shape == weight.shape[:1]


@functools.cache
def _path(dtype: torch.dtype) -> _Path:
    features = cpu.features()
    fast = features & cpu.FAST_IN_TORCH[str(dtype).removeprefix("torch.")]
    if fast:
        return _Path(None, f"torch: the CPU multiplies it itself ({', '.join(sorted(fast))})")
    kernels = _kernels()
    if isinstance(kernels, native.NativeKernels):
        return _Path(kernels.linear, f"native: {kernels.instruction_set} bits wide")
    if not features >= cpu.NEEDED:
        return _Path(None, f"torch: {kernels}")
    return _Path(upcast.linear, f"upcast: {kernels}")


@functools.cache
def _kernels() -> native.NativeKernels | str:
    """The compiled kernels, loaded at the first use, or why there are none."""
    features = cpu.features()
    if not features >= cpu.NEEDED:
        return f"the kernels need {', '.join(sorted(cpu.NEEDED))}, which this CPU does not name"
    try:
        return native.NativeKernels(512 if "avx512f" in features else 256)
    except native.UnavailableError as error:
        return f"no compiled kernel ({error})"
