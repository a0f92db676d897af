"""Parameters that are waited for where they are used, whoever uses them and however they are reached."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from medusa_runtime.weights.gate import Gate

# What looks at a tensor, not into it.
_HARMLESS = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.is_complex}
    | {
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "is_meta", "requires_grad", "layout", "is_leaf", "grad")
    }
)
_DTYPE, _DEVICE = Tensor.dtype.__get__, Tensor.device.__get__  # type: ignore[attr-defined]


class Awaited(nn.Parameter):
    """A parameter whose value has not come. Any function it is given to waits, and is given the value instead.

    A gate stands in front of a module's call; this is for code that takes a module's weight and never calls the module
    (``nn.MultiheadAttention`` and its ``out_proj``), and for references that were kept elsewhere.
    """

    gate: Gate
    to_dtype: torch.dtype
    to_device: torch.device
    arrived: nn.Parameter | None

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = deepcopy(_value(self), memo)
        return copied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in (_DTYPE, _DEVICE):  # equal, not the same: a getter is a new object each time
            return args[0].to_dtype if func == _DTYPE else args[0].to_device
        return func(*_values(args), **dict(zip(kwargs, _values(kwargs.values()), strict=True)))


def _values(given: Any) -> tuple[Any, ...]:
    return tuple(
        _value(item)
        if isinstance(item, Awaited)
        else type(item)(_values(item))
        if type(item) in (tuple, list)
        else item
        for item in given
    )


def _value(parameter: Awaited) -> Tensor:
    if parameter.arrived is None:
        parameter.gate.wait()
    assert parameter.arrived is not None
    return parameter.arrived


def await_value(parameter: nn.Parameter, gate: Gate, dtype: torch.dtype, device: torch.device) -> None:
    """Turn a placeholder into one that waits, in place, so that every reference to it does."""
    parameter.__class__ = Awaited
    assert isinstance(parameter, Awaited)
    parameter.gate, parameter.to_dtype, parameter.to_device, parameter.arrived = gate, dtype, device, None
