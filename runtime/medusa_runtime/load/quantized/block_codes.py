"""A quantized weight that consists of ggml's blocks, as GGUF files store it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from medusa_runtime.checkpoint.gguf.blocks import BLOCKS
from medusa_runtime.kernels import native
from medusa_runtime.kernels.compiled import native_kernels
from medusa_runtime.kernels.quantized import QuantizedParameter
from medusa_runtime.load.quantized import unpack_blocks

_CHUNK = 1 << 18  # how many values are converted at a time, so that their floats stay in the CPU's cache


class BlockCodes(NamedTuple):
    """A weight [out, in] whose rows are blocks of the format ``kind``, a key of ``BLOCKS``.

    stored: uint8 [out, bytes of a row], with contiguous rows. It may begin at any address.
    """

    stored: Tensor
    kind: str

    @property
    def transposed(self) -> bool:
        """Always False: ggml stores no values as [in, out]. ``Codes`` has the same property."""
        return False

    @property
    def shape(self) -> tuple[int, int]:
        """The rows and columns of the values."""
        rows, size_bytes = self.stored.shape
        block = BLOCKS[self.kind]
        return rows, size_bytes // block.size_bytes * block.values

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] in ``dtype``, computed in float32 and rounded once."""
        kernels, out = native_kernels(), torch.empty(self.shape, dtype=dtype)
        if isinstance(kernels, native.NativeKernels):
            kernels.dequantize(self._codes(), out)
        else:
            self._by_torch(out)
        return out

    def kept(self, dtype: torch.dtype) -> QuantizedParameter | None:
        """Return the weight for products that decode it as they go: a view, and None without compiled kernels.

        ``dtype`` is that of its floats for all else.
        """
        if not isinstance(native_kernels(), native.NativeKernels):
            return None
        return QuantizedParameter(self.stored, self._codes(), dtype)

    def _codes(self) -> native.StoredCodes:
        packing = native.BLOCK_PACKINGS[self.kind]
        return native.StoredCodes(self.stored.contiguous(), None, shape=self.shape, packing=packing, size=(1, 1))

    def _by_torch(self, out: Tensor) -> None:
        block, unpack = BLOCKS[self.kind], getattr(unpack_blocks, self.kind.lower())
        step = max(_CHUNK // self.shape[1], 1)
        for start in range(0, len(out), step):
            chunk = self.stored[start : start + step]
            values, scale, low = unpack(chunk.reshape(-1, block.size_bytes))
            floats = values.float() * scale.unsqueeze(2)
            if low is not None:
                floats -= low.unsqueeze(2)
            out[start : start + step] = floats.view(len(chunk), -1)


__all__ = ["BlockCodes"]
