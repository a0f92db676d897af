"""Layers that keep a state of a fixed size of each sequence: one compiled call each, or torch's operations.

A short convolution keeps the last few inputs. Linear attention keeps a matrix for each head, in float32: with the gated
delta rule (Yang et al., 2024), or without a rate as in Mamba 2 (Dao and Gu, 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_runtime.kernels.compiled import native_kernels_for
from medusa_runtime.kernels.native import LANES, MAX_TAPS, Steps


def steps_of(lengths: list[int]) -> Steps:
    """Return the steps of whole sequences with these numbers of tokens, each with a state of its own."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return Steps(torch.arange(len(lengths)), torch.zeros(len(lengths), dtype=torch.int64), starts)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, steps: Steps) -> Tensor:
    """Return the sums of the last ``taps`` inputs of each channel, weighted: [tokens, channels], in the dtype of x.

    x is [tokens, channels], weight [channels, taps], the last one that of the token itself, and bias [channels].
    ``states`` [slots, taps - 1, channels] have the inputs before these, the oldest first, and are updated.
    """
    channels, taps = weight.shape
    if not (x.dim() == 2 and x.shape[1] == channels and states.shape[1:] == (taps - 1, channels)):
        found = f"{list(x.shape)} and {list(states.shape)}"
        raise ValueError(f"expected x and states for {channels} channels and {taps} taps, found {found}")
    fits = channels % LANES == 0 and taps <= MAX_TAPS and x.stride(1) == 1 and weight.is_contiguous()
    if fits and states.is_contiguous() and (bias is None or (bias.is_contiguous() and bias.shape == (channels,))):
        others = () if bias is None else (bias,)
        kernels = native_kernels_for(x, weight, states, *others)
        if kernels is not None:
            return kernels.convolve(x, weight, bias, states, steps)
    out = torch.empty(x.shape, dtype=x.dtype)
    for slot, begin, start, stop in _spans(steps):
        before = states[slot] if begin else torch.zeros_like(states[slot])
        seen = torch.cat((before, x[start:stop]))
        wide = seen.float().unfold(0, taps, 1)  # [tokens, channels, taps]
        total = (wide * weight.float()).sum(-1)
        out[start:stop] = total if bias is None else total + bias.float()
        states[slot] = seen[len(seen) - taps + 1 :]
    return out


def recur(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor | None, states: Tensor, steps: Steps) -> Tensor:
    """Return what each token reads from its sequence's matrices, [tokens, heads, value_dim]. All are float32.

    Before it reads, with its query, a token multiplies the matrices with ``decay`` [tokens, heads], and adds its value
    under its key: of v [tokens, heads, value_dim], or with ``rate`` [tokens, heads], this share of what v differs from
    what is under the key already. q and k are [tokens, key_heads, key_dim], each for as many heads as go into
    ``heads``. ``states`` [slots, heads, key_dim, value_dim] are updated.
    """
    heads, size = v.shape[1:]
    fits = heads % k.shape[1] == 0 and q.shape == k.shape and decay.shape == v.shape[:2] == (len(k), heads)
    if not fits or states.shape[1:] != (heads, k.shape[2], size) or not (rate is None or rate.shape == decay.shape):
        found = ", ".join(str(list(one.shape)) for one in (q, k, v, decay, states))
        raise ValueError(f"expected shapes that fit, found {found}")
    if size % LANES == 0 and k.shape[2] % LANES == 0 and states.is_contiguous():
        q, k, v, decay = (one.contiguous() for one in (q, k, v, decay))
        rate = None if rate is None else rate.contiguous()
        kernels = native_kernels_for(q, k, v, decay, states, *(() if rate is None else (rate,)))
        if kernels is not None:
            return kernels.recur(q, k, v, decay, rate, states, steps)
    out = torch.empty(v.shape, dtype=torch.float32)
    q, k = (one.repeat_interleave(heads // k.shape[1], 1) for one in (q, k))
    for slot, begin, start, stop in _spans(steps):
        if not begin:
            states[slot] = 0
        state = states[slot]
        for token in range(start, stop):
            state *= decay[token, :, None, None]
            added = v[token]
            if rate is not None:
                added = rate[token, :, None] * (added - (state * k[token, :, :, None]).sum(1))
            state += k[token, :, :, None] * added[:, None]
            out[token] = (state * q[token, :, :, None]).sum(1)
    return out


def _spans(steps: Steps) -> list[tuple[int, int, int, int]]:
    starts = steps.starts.tolist()
    return list(zip(steps.slots.tolist(), steps.begins.tolist(), starts[:-1], starts[1:], strict=True))


__all__ = ["Steps", "convolve", "recur", "steps_of"]
