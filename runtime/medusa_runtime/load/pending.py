"""Parameters and buffers whose values have not arrived. Code that uses one waits, however it got hold of it.

A gate stands in front of a module's call. This module is for code that takes a module's weight and never calls the
module (``nn.MultiheadAttention`` and its ``out_proj``), and for references that are kept elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from medusa_runtime.errors import WeightsError
from medusa_runtime.kernels.quantized import QuantizedParameter
from medusa_runtime.kernels.tensor_metadata import DEVICE, IS_META, METADATA, OF_DTYPE, look

_KEY = "_medusa_pending"
_swap: Callable[[Tensor, Tensor], None] | None = getattr(torch._C, "_swap_tensor_impl", None)  # a private name
_tracing_state: Callable[[], object] | None = getattr(torch._C, "_get_tracing_state", None)  # another


class Waitable(Protocol):
    """What a pending tensor waits for: a gate."""

    def wait(self) -> None:
        """Return when the values are there. Raises the error that made them fail to arrive."""


@dataclass(eq=False, slots=True)
class PendingValue:
    """What is known about a tensor's value before it arrives."""

    gate: Waitable
    dtype: torch.dtype
    device: torch.device
    kind: type[Tensor]  # the tensor's class before and after
    value: Tensor | None = None  # set only if the tensor itself could not become its value


class PendingParameter(nn.Parameter):
    """A parameter whose value has not arrived. A torch function that receives it waits until it is a plain parameter.

    It stays the same object, so code that holds it, or lists a module's parameters meanwhile, sees each one once.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _copied(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _waited(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def detach(self) -> Tensor:
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:  # its own error would complain about our class
            raise WeightsError(
                "a parameter is made of a weight that has not come; expected this after context.weights.wait()"
            )
        return super().detach()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


class PendingBuffer(Tensor):
    """A buffer of the checkpoint whose value has not arrived.

    Unlike a pending parameter it has memory, with another value until the checkpoint's is written there.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _copied(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _waited(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


def can_be_pending(tensor: Tensor) -> bool:
    """Return whether ``make_pending`` accepts this tensor.

    It accepts neither a lazy tensor nor one whose class overrides torch functions.
    """
    return (type(tensor) is Tensor or issubclass(type(tensor), nn.Parameter)) and not is_lazy(tensor)


def make_pending(tensor: Tensor, gate: Waitable, dtype: torch.dtype, device: torch.device) -> None:
    """Turn a placeholder into a pending tensor, in place, so that every reference to it waits at ``gate``.

    ``dtype`` and ``device`` are those that its value will have.
    """
    vars(tensor)[_KEY] = PendingValue(gate, dtype, device, type(tensor))
    tensor.__class__ = PendingParameter if isinstance(tensor, nn.Parameter) else PendingBuffer


def pending_value(tensor: Any) -> PendingValue | None:
    """Return what a pending tensor waits for; None for any other tensor."""
    # Another thread may resolve it at any moment: callers ask once and keep the answer.
    is_pending = isinstance(tensor, PendingParameter | PendingBuffer)
    found: PendingValue | None = getattr(tensor, _KEY, None) if is_pending else None
    return found


def resolve(tensor: Tensor, value: Tensor) -> Tensor:
    """Give a pending tensor its value. Return the tensor that takes its place: nearly always the tensor itself.

    ``value`` is the tensor itself if its own memory was filled (``fill_in_place``), else the tensor that it becomes.
    """
    pending = pending_value(tensor)
    assert pending is not None
    if value is not tensor and not _swapped(tensor, value):
        value.__class__ = type(value) if isinstance(value, QuantizedParameter) else pending.kind
        vars(value).update({name: kept for name, kept in vars(tensor).items() if name != _KEY})
        pending.value = value
        return value
    kind = pending.kind
    if isinstance(value, QuantizedParameter):
        kind = type(value)
        vars(tensor).update(vars(value))
    tensor.__class__ = kind  # from here on other threads use it
    del vars(tensor)[_KEY]
    return tensor


def fill_in_place(tensor: Tensor, value: Tensor) -> bool:
    """Copy ``value`` into the tensor's own memory, as ``load_state_dict`` does. Return False if that is impossible."""
    with nullcontext() if pending_value(tensor) is None else torch._C.DisableTorchFunctionSubclass():
        if tensor.is_meta or 0 in tensor.stride() or (tensor.dtype, tensor.device) != (value.dtype, value.device):
            return False
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():  # as it was made
            tensor.copy_(value)
        return True


def refuse_tracing() -> None:
    """Raise WeightsError inside ``torch.jit.trace``, which has noted the parameters that are replaced here."""
    # torch.jit.is_tracing would execute all modules that a lean import of torch has put off.
    tracing = torch.jit.is_tracing() if _tracing_state is None else _tracing_state() is not None  # type: ignore[attr-defined,no-untyped-call]
    if tracing:
        raise too_early("torch.jit.trace")


def too_early(what: str) -> WeightsError:
    """Return the error for something that cannot wait for weights."""
    return WeightsError(f"{what} of a module whose weights have not come; expected context.weights.wait() first")


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func``: at once if it only looks at a pending tensor, else after all its pending tensors are resolved."""
    first = pending_value(args[0]) if args else None
    if first is not None and first.value is None and func in METADATA:
        if func in (DEVICE, IS_META):  # answer for the value to come, and hide that there is no memory yet
            return first.device if func == DEVICE else first.device.type == "meta"
        with torch._C.DisableTorchFunctionSubclass():
            if func in OF_DTYPE:
                return look(func, args[0].shape, first.dtype, args[1:], kwargs)
            return func(*args, **kwargs)
    refuse_tracing()
    return func(*_all_waited(args), **dict(zip(kwargs, _all_waited(kwargs.values()), strict=True)))


def _all_waited(values: Any) -> tuple[Any, ...]:
    return tuple(
        _waited(item)
        if isinstance(item, PendingParameter | PendingBuffer)
        else type(item)(_all_waited(item))
        if type(item) in (tuple, list)
        else item
        for item in values
    )


def _waited(tensor: Tensor) -> Tensor:
    """Wait for the tensor's value, and return the tensor that has it."""
    pending = pending_value(tensor)
    if pending is None:
        return tensor
    if pending.value is None:
        pending.gate.wait()
    return tensor if pending.value is None else pending.value


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    memo[id(tensor)] = copied = deepcopy(_waited(tensor), memo)
    return copied


def _swapped(tensor: Tensor, value: Tensor) -> bool:
    """Let ``tensor`` become ``value``. Return False if this torch cannot do that, or not with this tensor."""
    if _swap is None:
        return False
    try:
        _swap(tensor, value)
    except RuntimeError:  # C++ code refers to it, such as a torch.jit trace that was refused and will be tried again
        return False
    return True
