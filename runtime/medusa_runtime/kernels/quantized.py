"""Weights that stay quantized: parameters that look like the floats that they stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from medusa_runtime.kernels import native
from medusa_runtime.kernels.compiled import native_kernels
from medusa_runtime.kernels.tensor_metadata import METADATA, OF_DTYPE, OF_SHAPE, is_in_place, look


class QuantizedParameter(nn.Parameter):
    """A weight [out, in] in its quantized form. Its memory is that of the stored values, mostly a view of a region.

    ``linear`` multiplies with ``codes``. Any other function of torch gets the floats, which are made for it anew each
    time.
    """

    codes: native.StoredCodes
    floats_dtype: torch.dtype

    def __new__(cls, values: Tensor, codes: native.StoredCodes, dtype: torch.dtype) -> QuantizedParameter:
        made = super().__new__(cls, values, requires_grad=False)
        made.codes, made.floats_dtype = codes, dtype
        return made

    def floats(self) -> Tensor:
        """Return the floats that the weight stands for."""
        kernels = native_kernels()
        assert isinstance(kernels, native.NativeKernels)
        out = torch.empty(self.codes.shape, dtype=self.floats_dtype)
        kernels.dequantize(self.codes, out)
        order = self.codes.order
        return out if order is None else torch.empty_like(out).index_copy_(1, order, out)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedParameter:
        memo[id(self)] = self  # nothing can change it
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.floats(), requires_grad=False).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in OF_SHAPE or func in OF_DTYPE:
            return look(func, args[0].codes.shape, args[0].floats_dtype, args[1:], kwargs or {})
        if func in METADATA:  # the rest of it is that of the stored values
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        if args and type(args[0]) is QuantizedParameter and is_in_place(func):
            raise RuntimeError(f"{func.__name__} would change a weight that stays quantized; expected it on its floats")
        return func(*_plain(args), **dict(zip(kwargs or {}, _plain((kwargs or {}).values()), strict=True)))


def _plain(values: Any) -> tuple[Any, ...]:
    return tuple(
        value.floats()
        if type(value) is QuantizedParameter
        else type(value)(_plain(value))
        if type(value) in (tuple, list)
        else value
        for value in values
    )


__all__ = ["QuantizedParameter"]
