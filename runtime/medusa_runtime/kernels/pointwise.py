"""The steps between the products of a decoder layer: one compiled call each, or torch's operations.

Both ways round alike, after every operation. torch needs many operations for each step, and on a busy machine each
operation that uses OpenMP's threads also waits until the system lets all of them run.

The kernels trust the shapes, which a hostile config.json may have chosen. So they are called only for shapes that fit;
for others torch's operations raise an error.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_runtime.kernels.compiled import native_kernels_for
from medusa_runtime.kernels.native import LANES


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, once: bool = False, offset: float = 0.0) -> Tensor:
    """Return x [..., size] divided by the root of its mean square (in fp32), rounded, times weight [size].

    ``offset`` is added to the weight. With ``once`` only the result is rounded.
    """
    size = x.shape[-1]
    if size % LANES == 0 and x.stride()[-1] == 1 and weight.numel() == size and weight.is_contiguous():
        kernels = native_kernels_for(x, weight)
        if kernels is not None:
            if x.dim() in (2, 3) and x.numel():
                return kernels.norm(x, weight, eps, once=once, offset=offset)
            rows = kernels.norm(x.reshape(-1, size), weight, eps, once=once, offset=offset)
            return rows.view(x.shape)
    if x.is_cuda and not offset:
        return F.rms_norm(x, (size,), weight, eps)  # one kernel, which rounds once
    # Not torch.rms_norm: on a CPU it takes eight times as long for a 16-bit prefill, and rounds once less.
    wide = x.float()
    scale = wide.square().mean(-1, True).add_(eps).rsqrt_()
    if once:
        return (wide * scale * (weight.float() + offset)).to(x.dtype)
    return (wide * scale).to(x.dtype).mul_(weight + offset if offset else weight)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k [tokens, heads, head_dim] with the first ``rotated`` dimensions of each head rotated.

    cos and sin are [tokens, 1, rotated]; the first half of the sines is negated. The inputs may be overwritten.
    """
    heads = (q.shape[2], 1)
    if (
        cos.shape[2] % (2 * LANES) == 0
        and cos.shape[2] <= q.shape[2] == k.shape[2]
        and len(cos) == len(sin) == len(q) == len(k)
        and cos.shape == sin.shape
        and q.stride()[1:] == heads == k.stride()[1:]
        and cos.is_contiguous()
        and sin.is_contiguous()
    ):
        kernels = native_kernels_for(q, k, cos, sin)
        if kernels is not None:
            kernels.rotate(q, k, cos, sin)
            return q, k
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = cos.shape[-1]
    part = x if size == x.shape[-1] else x[..., :size]
    result = torch.addcmul(part * cos, part.roll(size // 2, -1), sin)
    return result if part is x else torch.cat((result, x[..., size:]), -1)


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, each [rows, size] (SwiGLU; Shazeer, 2020)."""
    if (
        gate.dim() == 2
        and gate.shape == up.shape
        and gate.shape[1] % LANES == 0
        and gate.stride(1) == 1 == up.stride(1)
    ):
        kernels = native_kernels_for(gate, up)
        if kernels is not None:
            return kernels.gate(gate, up)
    return F.silu(gate) * up


def write_kv(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k and v [tokens, kv_heads, head_dim] to ``slots`` (int64 [tokens]) of [all slots, kv_heads, head_dim]."""
    heads = (k.shape[2], 1)
    if (
        k.shape == v.shape
        and k.shape[1:] == keys.shape[1:]
        and keys.shape == values.shape
        and len(slots) == len(k)
        and k.stride()[1:] == heads == v.stride()[1:]
        and keys.is_contiguous()
        and values.is_contiguous()
    ):
        kernels = native_kernels_for(k, v, keys, values)
        if kernels is not None:
            kernels.write_kv(keys, values, slots, k, v)
            return
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v)
