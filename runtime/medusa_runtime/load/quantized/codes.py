"""A weight as small integers (or 8-bit floats) with scales, whatever its layout was, and the floats it stands for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK = 1 << 18  # values that are floats at a time, so that they stay in a cache


class Codes(NamedTuple):
    """``(values - zero) * scale``, each in float32: a weight [out, in], or [in, out] where it is ``transposed``.

    ``scale`` [a, b] is for a x b blocks of equal size; ``zero`` has its shape, or is one number [1, 1], or there is
    none. ``block``: the size, where those at the edges are smaller. ``group_of`` [in]: the group of each column, where
    it is not its neighbours'.
    """

    values: Tensor
    scale: Tensor
    zero: Tensor | None = None
    block: tuple[int, int] | None = None
    group_of: Tensor | None = None
    transposed: bool = False

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] in ``dtype``, rounded once."""
        rows, columns = self.values.shape
        scale, zero = self._spread(self.scale.float()), None
        if self.zero is not None:
            zero = self._spread(self.zero.float()) if self.zero.numel() > 1 else self.zero.float()
        if scale.shape[0] == 1:  # in chunks of rows, all the same
            scale = scale.expand(rows, -1)
            zero = None if zero is None else zero.expand(rows, -1) if zero.numel() > 1 else zero
        high, wide = rows // scale.shape[0], columns // scale.shape[1]
        out = torch.empty((columns, rows) if self.transposed else (rows, columns), dtype=dtype)
        step = max(_CHUNK // columns // high, 1)  # rows of scales
        for start in range(0, scale.shape[0], step):
            part = scale[start : start + step]
            chunk = slice(start * high, (start + len(part)) * high)
            floats = self.values[chunk].float()
            blocks = floats.view(len(part), high, scale.shape[1], wide)
            if zero is not None:
                shift = zero[start : start + step] if zero.numel() > 1 else zero
                blocks -= shift[:, None, :, None]
            blocks *= part[:, None, :, None]
            if self.transposed:
                out[:, chunk] = floats.t()
            else:
                out[chunk] = floats
        return out

    def _spread(self, scale: Tensor) -> Tensor:
        """A scale for blocks of equal size, which are the whole matrix."""
        if self.group_of is not None:
            return scale[self.group_of] if self.transposed else scale[:, self.group_of]
        if self.block is None:
            return scale
        for axis, (size, length) in enumerate(zip(self.block, self.values.shape, strict=True)):
            if length % size:
                scale = scale.repeat_interleave(size, axis).narrow(axis, 0, length)
        return scale


__all__ = ["Codes"]
