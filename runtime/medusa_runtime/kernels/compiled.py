"""The compiled kernels of this process, loaded at their first use."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from medusa_runtime.kernels import cpu, native


@functools.cache
def native_kernels() -> native.NativeKernels | str:
    """Return the kernels, or the reason why there are none."""
    features = cpu.features()
    if not features >= cpu.NEEDED:
        return f"the kernels need {', '.join(sorted(cpu.NEEDED))}, which this CPU does not name"
    try:
        if "asimd" in features:
            return native.NativeKernels(128, bf16_dots="bf16" in features, byte_dots="asimddp" in features)
        return native.NativeKernels(512 if "avx512f" in features else 256, bf16_dots=features >= cpu.AVX512_DOTS)
    except native.UnavailableError as error:
        return f"no compiled kernel ({error})"


def native_kernels_for(*tensors: Tensor) -> native.NativeKernels | None:
    """Return the kernels if they can take these tensors: on the CPU, of one known dtype, without gradients."""
    kernels = native_kernels()
    dtype = tensors[0].dtype
    if isinstance(kernels, str) or dtype not in native.DTYPES or torch.is_grad_enabled():
        return None
    for tensor in tensors:
        if tensor.dtype is not dtype or not tensor.is_cpu:
            return None
    return kernels
