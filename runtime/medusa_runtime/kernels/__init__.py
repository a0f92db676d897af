"""The expensive steps of a forward pass on a CPU, as fast as its memory allows. For a GPU see ``cuda``.

``linear`` is F.linear for weights that stay where they are (read-only, shared, unpacked). torch's own product is slow
for few rows, unless the CPU has matrix units (AMX), and for 16-bit weights on CPUs without dot products of 16 bits.
There a compiled kernel is used, or, if there is none, fp32 products of slices of 16-bit weights. ``paged_attention``
reads keys and values from the paged cache, without gathering them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_runtime.kernels import cpu, cuda, native, paged, upcast
from medusa_runtime.kernels.compiled import native_kernels
from medusa_runtime.kernels.pointwise import rms_norm, rotate, silu_gate, write_kv
from medusa_runtime.kernels.quantized import QuantizedParameter

__all__ = [
    "concatenated_linear",
    "describe",
    "embedding",
    "has_native_products",
    "linear",
    "linears",
    "paged_attention",
    "rms_norm",
    "rotate",
    "silu_gate",
    "small_linear",
    "write_kv",
]

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class _Path(NamedTuple):
    product: Product | None  # None: F.linear
    reason: str  # for describe()
    compiled: native.NativeKernels | None = None
    most_rows: float = math.inf  # products of more rows are left to torch


_TORCH = _Path(None, "torch")
_SLICE_COLS = 1024  # rows of a quantized weight that are floats at a time
# For fp32, or with bf16 dot products. For more rows, packing the weights each time, as torch does, pays off.
_FEW_ROWS = 32
_FEW_CODED_ROWS = 96  # the same for quantized weights, which torch needs as floats first


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Return x [..., depth] @ weight [cols, depth]^T + bias [cols] → [..., cols], accumulated in fp32, rounded once.

    This is F.linear itself where that is fastest, and for other dtypes, other devices, and gradients. ``residual``
    [..., cols] is added to the rounded product, and the sum is rounded again.
    """
    path = _path_of(x, weight, bias)
    if path.compiled is not None:
        x = _ordered(x, weight)
        if residual is None or _like_result(residual, x, weight):
            rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
            addend = residual if residual is None or residual.dim() == 2 else residual.view(-1, residual.shape[-1])
            out = path.compiled.products(rows, (weight,), (bias,), addend)
            return out if rows is x else out.view(*x.shape[:-1], weight.shape[0])
        return residual + linear(x, weight, bias)
    if path.product is None:
        out = F.linear(x, weight, bias)
    else:
        out = path.product(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])
    return out if residual is None else residual + out


def small_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [rows, depth] @ weight [cols, depth]^T → [rows, cols], a product too small for several threads.

    With 16-bit weights our kernel computes it on one thread, even where torch's is faster for large products: torch's
    would wait for its other threads each time.
    """
    kernels = native_kernels() if weight.dtype in (torch.bfloat16, torch.float16) else None
    if not isinstance(kernels, native.NativeKernels) or not _plain(x, weight):
        return linear(x, weight)
    return kernels.linear(x, weight, None)


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Return ``linear`` of x [rows, depth] with each weight and bias, in one call where possible.

    The products may be views of one result.
    """
    if x.dim() == 2:
        paths = [_path_of(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        path = paths[0]
        if path.compiled is not None and _go_together(paths, weights):
            products = path.compiled.products(x, weights, biases)
            return torch.split_with_sizes(products, [weight.shape[0] for weight in weights], 1)
        if not x.is_cpu:
            together = cuda.fused_weights(weights, biases)
            if together is not None:
                return torch.split_with_sizes(F.linear(x, *together), [weight.shape[0] for weight in weights], 1)
    return [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def concatenated_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """Return ``linear`` of x [..., depth] with each weight [cols, depth] and bias, concatenated: [..., all cols]."""
    paths = [_path_of(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    kernel = paths[0].compiled
    if kernel is None or not _go_together(paths, weights):
        return torch.cat([linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)], -1)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    out = kernel.products(rows, weights, biases)
    return out if rows is x else out.view(*x.shape[:-1], out.shape[-1])


def embedding(places: Tensor, weight: Tensor) -> Tensor:
    """Return the rows of weight [rows, size] at ``places`` [...], integers: [..., size].

    Of a quantized weight, only these rows become floats. Raises IndexError for a place that is no row.
    """
    kernels = native_kernels() if type(weight) is QuantizedParameter else None
    if not isinstance(kernels, native.NativeKernels) or places.device != weight.device:  # a look: see _codes_path
        return F.embedding(places, weight)
    assert type(weight) is QuantizedParameter
    codes, rows = weight.codes, places.reshape(-1).to(torch.int64)
    out = torch.empty(len(rows), codes.shape[1], dtype=weight.floats_dtype)
    kernels.gather(codes, rows.contiguous(), out)
    if codes.order is not None:
        out = torch.empty_like(out).index_copy_(1, codes.order, out)
    return out.view(*places.shape, codes.shape[1])


def has_native_products(dtype: torch.dtype) -> bool:
    """Return whether our compiled kernels do all products of this dtype on this machine, with any number of rows."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    path = _path(dtype)
    return path.compiled is not None and path.most_rows == math.inf


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
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal attention of new tokens over a paged KV cache (PagedAttention, Kwon et al. 2023, section 4.1).

    q: [tokens, heads, head_dim], any mix of prefill and decode, with the tokens of a sequence next to each other.
    keys, values: [blocks, block_size, kv_heads, head_dim], which already include those of the new tokens.
    block_tables: int32 [sequences, max_blocks], the blocks of each sequence.
    sequences: int32 [tokens], each token's row of ``block_tables``.
    contexts: int32 [tokens], how many tokens of its sequence a token sees, including itself (position + 1).
    window: the most of them that it sees, the last ones; None for all.
    sinks: [heads], the scores of an extra position that has no value (GPT-OSS).

    Returns [tokens, heads, head_dim]. Blocks that no token sees are not read.
    """
    kernels = native_kernels()
    indices = (block_tables, sequences, contexts)
    if (
        isinstance(kernels, native.NativeKernels)
        and q.is_cpu
        and q.dtype in native.DTYPES
        and q.dtype is keys.dtype is values.dtype
        and q.shape[1] % keys.shape[2] == 0  # for other shapes torch raises an error, and the kernel would not
        and q.shape[2] == keys.shape[3]
        and keys.shape == values.shape
        and q.shape[2] <= native.MAX_HEAD_DIM
        and q.shape[2] % 16 == 0
        and q.stride()[1:] == (q.shape[2], 1)
        and keys.stride(3) == values.stride(3) == 1
        and all(index.dtype is torch.int32 and index.stride()[-1] == 1 for index in indices)
        and (sinks is None or (sinks.dtype is q.dtype and sinks.is_contiguous() and sinks.shape == q.shape[1:2]))
        and not torch.is_grad_enabled()
    ):
        return kernels.attention(q, keys, values, *indices, scale=scale, window=window, sinks=sinks)
    return paged.attention(q, keys, values, *indices, scale=scale, window=window, sinks=sinks)


def describe() -> dict[str, str]:
    """Return how products of each dtype, attention, and quantized weights are computed on this machine, and why."""
    kernels = native_kernels()
    has_none = isinstance(kernels, str)
    return {name: _path(getattr(torch, name)).reason for name in cpu.FAST_IN_TORCH} | {
        "attention": f"torch: {kernels}" if has_none else "native",
        "quantized weights": f"kept as floats: {kernels}" if has_none else "native: decoded inside products",
        "GGUF's blocks": f"kept as floats: {kernels}" if has_none else "native: in integers, unless x is float32",
    }


def _path_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> _Path:
    if type(weight) is QuantizedParameter:
        return _codes_path(x, weight, bias)
    if weight.dtype not in native.DTYPES:
        return _TORCH
    path = _path(weight.dtype)
    if (
        path.product is None
        or x.numel() > path.most_rows * weight.shape[-1]
        or not _plain(x, weight)
        or (bias is not None and not _plain_bias(bias, weight))
    ):
        return _TORCH
    return path


def _plain(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernels can take these tensors. For the others F.linear raises an error if they do not fit."""
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


def _go_together(paths: Sequence[_Path], weights: Sequence[Tensor]) -> bool:
    """Return whether one call of a kernel can compute all products: quantized weights and others do not mix."""
    return all(path is paths[0] for path in paths) and (
        paths[0] is not _decoded() or all(one.codes.order is None for one in weights)  # type: ignore[attr-defined]
    )


def _ordered(x: Tensor, weight: Tensor) -> Tensor:
    """Return x with its last dimension in the order of a quantized weight's columns."""
    order = weight.codes.order if type(weight) is QuantizedParameter else None
    return x if order is None else x.index_select(-1, order)


def _codes_path(x: Tensor, weight: QuantizedParameter, bias: Tensor | None) -> _Path:
    """Return the path for a quantized weight, whose codes are decoded as the product goes."""
    codes, shape = weight.codes, x.shape
    if (
        x.dtype in native.DTYPES
        and x.device == weight.device  # a look at the weight, by which load/trace.py notices its use
        and len(shape) > 0
        and shape[-1] == codes.shape[1]
        and x.stride()[-1] == 1
        and 0 < x.numel() <= _most_coded_rows(x.dtype) * codes.shape[1]
        and not (torch.is_grad_enabled() and x.requires_grad)
        and (bias is None or (bias.dtype is x.dtype and bias.is_contiguous() and bias.shape == codes.shape[:1]))
    ):
        return _decoded()
    return _DEQUANTIZED


@functools.cache
def _decoded() -> _Path:
    kernels = native_kernels()
    assert isinstance(kernels, native.NativeKernels)
    return _Path(kernels.linear, "native, decoded as it goes", kernels)


@functools.cache
def _most_coded_rows(dtype: torch.dtype) -> float:
    """Return up to how many rows our kernel multiplies with quantized weights; torch is faster for more."""
    path = _path(dtype)
    return _FEW_ROWS if path.compiled is None else max(path.most_rows, _FEW_CODED_ROWS)


def _dequantized_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [rows, depth] @ a quantized weight^T + bias → [rows, cols] by torch, with the floats of a slice."""
    kernels = native_kernels()
    assert isinstance(kernels, native.NativeKernels)
    assert isinstance(weight, QuantizedParameter)
    if torch.is_grad_enabled() and x.requires_grad:  # the gradient needs all floats, unchanged
        return F.linear(x, weight.floats().to(x.dtype), bias)
    codes, x = weight.codes, _ordered(x, weight)
    (cols, depth), high = codes.shape, codes.block_rows
    step = _SLICE_COLS if high >= cols else -(-_SLICE_COLS // high) * high
    floats, outs = torch.empty(min(step, cols), depth, dtype=x.dtype), []
    for start in range(0, cols, step):
        part = floats[: min(step, cols - start)]
        kernels.dequantize(codes, part, first_row=start)
        outs.append(F.linear(x, part, None if bias is None else bias[start : start + step]))
    return torch.cat(outs, -1)


_DEQUANTIZED = _Path(_dequantized_linear, "torch, with floats of a slice at a time")


def _plain_bias(bias: Tensor, weight: Tensor) -> bool:
    return bias.is_cpu and bias.dtype is weight.dtype and bias.is_contiguous() and bias.shape == weight.shape[:1]


def _like_result(residual: Tensor, x: Tensor, weight: Tensor) -> bool:
    shape = residual.shape
    return (
        residual.dtype is x.dtype
        and residual.is_cpu
        and shape[:-1] == x.shape[:-1]
        and shape[-1] == weight.shape[0]
        and residual.stride()[-1] == 1
        and (residual.dim() == 2 or residual.is_contiguous())
    )


@functools.cache
def _path(dtype: torch.dtype) -> _Path:
    features = cpu.features()
    fast = features & cpu.FAST_IN_TORCH[str(dtype).removeprefix("torch.")]
    kernels = native_kernels()
    if len(fast) == 1 and fast <= cpu.DOTS and isinstance(kernels, native.NativeKernels) and kernels.bf16_dots:
        reason = f"native up to {_FEW_ROWS} rows, torch for more: the CPU multiplies it itself ({', '.join(fast)})"
        return _Path(kernels.linear, reason, kernels, _FEW_ROWS)
    if fast:
        return _Path(None, f"torch: the CPU multiplies it itself ({', '.join(sorted(fast))})")
    if isinstance(kernels, native.NativeKernels):
        width = f"{kernels.instruction_set} bits wide"
        if dtype is torch.float32:
            return _Path(kernels.linear, f"native up to {_FEW_ROWS} rows, torch for more: {width}", kernels, _FEW_ROWS)
        return _Path(kernels.linear, f"native: {width}", kernels)
    if dtype is torch.float32 or not features >= cpu.NEEDED:
        return _Path(None, f"torch: {kernels}")
    return _Path(upcast.linear, f"upcast: {kernels}")
