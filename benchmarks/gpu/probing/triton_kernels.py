"""Triton kernels of the probe: two variants of one name, a pair with a programmatic edge, and our attention."""

from __future__ import annotations

import triton
import triton.language as tl
from medusa_runtime.kernels import paged_triton
from torch import Tensor

_TILE, _COUNT = 1024, 8 * 4096


@triton.jit  # type: ignore[untyped-decorator]
def _times(x, out, count, FACTOR: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both variants have this name, and the same parameters: their images alone tell them apart."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = place < count
    value = tl.load(x + place, mask=mask).to(tl.float32)
    for _ in tl.static_range(FACTOR):
        value = value + value
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)


def variants(x: Tensor, out: Tensor) -> None:
    """x times 2 into the first rows of ``out``, and times 8 into the next."""
    for number, factor in enumerate((1, 3)):
        _times[(_COUNT // _TILE,)](x, out[8 * number :], _COUNT, FACTOR=factor, TILE=_TILE)


def programmatic_pair(x: Tensor, out: Tensor) -> None:
    """Two launches of which the second may begin while the first still runs; it has no work that would depend on it."""
    _times[(_COUNT // _TILE,)](x, out, _COUNT, FACTOR=1, TILE=_TILE)
    _times[(_COUNT // _TILE,)](x[8:], out[8:], _COUNT, FACTOR=3, TILE=_TILE, launch_pdl=True)


def attention(x: Tensor, keys: Tensor, values: Tensor, tables: Tensor, contexts: Tensor, out: Tensor) -> None:
    """Decode attention of four sequences and of one, which split their contexts into different numbers of parts."""
    for rows in (4, 1):
        q = x[:rows].view(rows, 32, 128)
        found = paged_triton.decode(q, keys, values, tables[:rows], contexts[:rows], scale=0.1, window=None)
        out[4 - rows : 4].copy_(found.view(rows, -1))


__all__ = ["attention", "programmatic_pair", "variants"]
