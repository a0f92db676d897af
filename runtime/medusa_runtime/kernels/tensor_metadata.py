"""The functions of torch that look at a tensor and not at its values, so that they need not wait for these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def _getters(*names: str) -> frozenset[Any]:
    return frozenset(getattr(Tensor, name).__get__ for name in names)


# torch makes a new getter at each look-up. They are equal, so they are compared, or looked up in a set, and never with
# ``is``.
DEVICE, IS_META = Tensor.device.__get__, Tensor.is_meta.__get__  # type: ignore[attr-defined]
OF_SHAPE = _getters("shape", "ndim") | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.__len__}
OF_DTYPE = _getters("dtype", "itemsize", "nbytes") | {
    Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size,
}  # fmt: skip
METADATA = OF_SHAPE | OF_DTYPE | {DEVICE, IS_META} | _getters("requires_grad", "is_leaf", "grad", "layout")


def look(func: Any, shape: Sequence[int], dtype: torch.dtype, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a function OF_SHAPE or OF_DTYPE returns for a tensor of this form, given its other arguments."""
    return func(torch.empty(shape, dtype=dtype, device="meta"), *args, **kwargs)


def is_in_place(func: Any) -> bool:
    """Return whether a function of torch writes to its first argument."""
    name: str = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")
