"""The products of a forward pass on a CPU, as fast as its memory allows.

``linear`` is F.linear for 16-bit weights that stay where they are (read-only, shared, unpacked). torch's own product is
slow on x86 CPUs without 16-bit dot products; there a compiled kernel does it, or, uncompiled, fp32 slices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_runtime.kernels import cpu

__all__ = ["describe", "linear"]

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


def describe() -> dict[str, str]:
    """For each 16-bit dtype: which way its products take on this machine, and why."""
    return {name: _path(getattr(torch, name)).reason for name in cpu.FAST_IN_TORCH}


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
    if not features >= cpu.NEEDED:
        return _Path(None, f"torch: the kernels need {', '.join(sorted(cpu.NEEDED))}, which this CPU does not name")
    from medusa_runtime.kernels import native, upcast  # not before the first product: importing does nothing

    instruction_set = 512 if "avx512f" in features else 256
    try:
        kernels = native.NativeKernels(instruction_set)
    except native.UnavailableError as error:
        return _Path(upcast.linear, f"upcast: no compiled kernel ({error})")
    return _Path(kernels.linear, f"native: {'AVX-512F' if instruction_set == 512 else 'AVX2'}, {kernels.threads}")
