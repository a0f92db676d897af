"""A quantized weight in a form that no longer depends on its layout: integers (or 8-bit floats) with their scales."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from medusa_runtime.kernels import native
from medusa_runtime.kernels.compiled import native_kernels
from medusa_runtime.kernels.quantized import QuantizedParameter
from medusa_runtime.load.quantized import unpack

_CHUNK = 1 << 18  # how many values are converted at a time, so that their floats stay in the CPU's cache
_SIGNED, _UNSIGNED, _TABLE, _NIBBLES, _E4M3, _E2M1 = (
    0,
    1,
    2,
    3,
    7,
    8,
)  # how the kernels read values: the enum in codes.h
_PACKED = {
    ("across", 4): _NIBBLES, ("across", 8): _UNSIGNED, ("down", 4): 4, ("down", 8): 5, ("interleaved", 4): 6,
    ("e2m1", 4): _E2M1,
}  # fmt: skip
NIBBLE_RUN = 8  # the columns of a row of nibbles are a multiple of it
_BYTES = {torch.int8: _SIGNED, torch.uint8: _UNSIGNED, torch.float8_e4m3fn: _E4M3, torch.float8_e5m2: _TABLE}


class Codes(NamedTuple):
    """A weight whose floats are ``(values - zero) * scale``, computed in float32.

    It has the shape [out, in], or [in, out] if it is ``transposed``.

    stored: the values, 8 bits wide, or words or bytes from which ``packing`` (a function of ``unpack``) takes values of
        ``bits``.
    scale: [a, b], one for each of a x b blocks of equal size.
    zero: like ``scale``, or one number [1, 1], or None.
    block: rows and columns of a block, for weights whose blocks at the edges are smaller.
    group_of: [in], the group of each column, for weights whose groups are not runs of neighbouring columns.
    """

    stored: Tensor
    scale: Tensor
    zero: Tensor | None = None
    packing: str | None = None
    bits: int = 8
    block: tuple[int, int] | None = None
    group_of: Tensor | None = None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The rows and columns of the values."""
        rows, columns = self.stored.shape
        many = 1 if self.packing is None else 8 * self.stored.element_size() // self.bits
        return (rows * many, columns) if self.packing == "down" else (rows, columns * many)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] in ``dtype``, rounded once."""
        shape, kernels, packing = self.shape, native_kernels(), self._packing
        out = torch.empty(shape[::-1] if self.transposed else shape, dtype=dtype)
        if isinstance(kernels, native.NativeKernels) and packing is not None:
            kernels.dequantize(self._stored(packing), out)
        else:
            self._by_torch(out)
        return out

    def kept(self, dtype: torch.dtype) -> QuantizedParameter | None:
        """Return the weight for products that decode it as they go. ``dtype`` is that of its floats for all else.

        The values stay where they are, unless they are transposed: then they are copied into rows, the columns of a
        group beside each other. None if no kernel multiplies with such a weight.
        """
        kernels, packing = native_kernels(), self._packing
        if not isinstance(kernels, native.NativeKernels) or packing is None:
            return None
        order = self._order()
        if self.group_of is not None and order is None:
            return None
        if not self.transposed:
            values, codes = self.stored, self._stored(packing)
        else:
            inputs, outputs = self.shape
            if inputs % NIBBLE_RUN:
                return None
            values = torch.empty(outputs, inputs // 2 if self.bits == 4 else inputs, dtype=torch.uint8)
            kernels.transpose(self._stored(packing), values, order)
            scale = self.scale.t().clone(memory_format=torch.contiguous_format)  # never a view of the region
            codes = native.StoredCodes(
                values,
                scale,
                shape=(outputs, inputs),
                packing=_NIBBLES if self.bits == 4 else _UNSIGNED,
                size=(1, inputs // scale.shape[1]),
                zero=None if self.zero is None else self.zero.bfloat16().t().contiguous(),
                order=order,
            )
        return QuantizedParameter(values, codes, dtype)

    def _order(self) -> Tensor | None:
        """Return the columns of transposed codes, group by group; None if that is their order, or cannot be had."""
        if self.group_of is None or not self.transposed:
            return None
        sizes = torch.bincount(self.group_of, minlength=self.scale.shape[0])
        return self.group_of.argsort(stable=True) if bool((sizes == sizes[0]).all()) else None

    @property
    def _packing(self) -> int | None:
        return _BYTES.get(self.stored.dtype) if self.packing is None else _PACKED.get((self.packing, self.bits))

    def _stored(self, packing: int) -> native.StoredCodes:
        shape, scale = self.shape, self.scale.contiguous()
        table = None
        if packing in (_TABLE, _E4M3):
            table = torch.arange(256, dtype=torch.uint8).view(self.stored.dtype).float()
        return native.StoredCodes(
            self.stored.contiguous(),
            scale,
            shape=shape,
            packing=packing,
            size=self.block or (shape[0] // scale.shape[0], shape[1] // scale.shape[1]),
            zero=None if self.zero is None else self.zero.bfloat16().contiguous(),
            group_of=self.group_of,
            table=table,
            transposed=self.transposed,
        )

    def _by_torch(self, out: Tensor) -> None:
        values = self.stored if self.packing is None else getattr(unpack, self.packing)(self.stored, self.bits)
        rows, columns = values.shape
        scale, zero = self._spread(self.scale.float()), None
        if self.zero is not None:
            zero = self._spread(self.zero.float()) if self.zero.numel() > 1 else self.zero.float()
        if scale.shape[0] == 1:  # give every row the same scale, so that the loop below can go in chunks of rows
            scale = scale.expand(rows, -1)
            zero = None if zero is None else zero.expand(rows, -1) if zero.numel() > 1 else zero
        high, wide = rows // scale.shape[0], columns // scale.shape[1]
        step = max(_CHUNK // columns // high, 1)  # rows of scales
        for start in range(0, scale.shape[0], step):
            part = scale[start : start + step]
            chunk = slice(start * high, (start + len(part)) * high)
            floats = values[chunk].float()
            blocks = floats.view(len(part), high, scale.shape[1], wide)
            if zero is not None:
                shift = zero[start : start + step] if zero.numel() > 1 else zero
                blocks -= shift[:, None, :, None]
            blocks *= part[:, None, :, None]
            if self.transposed:
                out[:, chunk] = floats.t()
            else:
                out[chunk] = floats

    def _spread(self, scale: Tensor) -> Tensor:
        """Return a scale for blocks of equal size that cover the whole matrix."""
        if self.group_of is not None:
            return scale[self.group_of] if self.transposed else scale[:, self.group_of]
        if self.block is None:
            return scale
        for axis, (size, length) in enumerate(zip(self.block, self.shape, strict=True)):
            if length % size:
                scale = scale.repeat_interleave(size, axis).narrow(axis, 0, length)
        return scale


__all__ = ["NIBBLE_RUN", "Codes"]
