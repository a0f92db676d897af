"""Parameters and buffers that are waited for where they are used, whoever uses them and however they are reached."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from medusa_runtime.errors import WeightsError

if TYPE_CHECKING:
    from medusa_runtime.load.gate import Gate

# What looks at a tensor, not into it.
_HARMLESS = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.is_complex}
    | {getattr(Tensor, name).__get__ for name in ("shape", "ndim", "requires_grad", "layout", "is_leaf", "grad")}
)
_DTYPE, _DEVICE = Tensor.dtype.__get__, Tensor.device.__get__  # type: ignore[attr-defined]
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_KEY = "_medusa_coming"
_swap: Callable[[Tensor, Tensor], None] | None = getattr(torch._C, "_swap_tensor_impl", None)  # a private name
_tracing_state: Callable[[], object] | None = getattr(torch._C, "_get_tracing_state", None)  # another


@dataclass(eq=False, slots=True)
class Coming:
    """What is known of a value before it is there."""

    gate: Gate
    dtype: torch.dtype
    device: torch.device
    kind: type[Tensor]  # of what it was made
    value: Tensor | None = None  # only where it could not become it itself


class PendingParameter(nn.Parameter):
    """A parameter whose value has not come. Any function it is given to waits until it has become a plain one.

    It stays the same object, so that whoever holds it, or goes through a module's parameters meanwhile, has each once.
    A gate stands in front of a module's call; this is for code that takes a module's weight and never calls the module
    (``nn.MultiheadAttention`` and its ``out_proj``), and for references that were kept elsewhere.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _copied(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _value(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def detach(self) -> Tensor:
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:  # wants our class back, and would only say that
            raise WeightsError(
                "a parameter is made of a weight that has not come; expected this after context.weights.wait()"
            )
        return super().detach()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _answer(func, args, kwargs or {})


class PendingBuffer(Tensor):
    """The same for a buffer of the checkpoint. It is memory already, with another value, and gets its own in place."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _copied(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _value(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return _answer(func, args, kwargs or {})


def coming(tensor: Any) -> Coming | None:
    """Of one that waits."""
    # In another thread its value may come in between: so this is asked once, and then remembered.
    found: Coming | None = getattr(tensor, _KEY, None) if isinstance(tensor, PendingParameter | PendingBuffer) else None
    return found


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = coming(args[0]) if args else None
    if first is not None and first.value is None:
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in (_DTYPE, _DEVICE):  # equal, not the same: a getter is a new object each time
            return first.dtype if func == _DTYPE else first.device
        if func == _IS_META:  # that it has no memory yet is nobody's business
            return first.device.type == "meta"
    refuse_tracing()
    return func(*_values(args), **dict(zip(kwargs, _values(kwargs.values()), strict=True)))


def refuse_tracing() -> None:
    """WeightsError in ``torch.jit.trace``: it has noted which tensors are parameters, and would find others."""
    if _is_tracing():
        raise too_early("torch.jit.trace")


def _is_tracing() -> bool:
    # torch.jit.is_tracing would execute all that a lean import has deferred.
    return bool(torch.jit.is_tracing()) if _tracing_state is None else _tracing_state() is not None


def too_early(what: str) -> WeightsError:
    return WeightsError(f"{what} of a module whose weights have not come; expected context.weights.wait() first")


def _values(given: Any) -> tuple[Any, ...]:
    return tuple(
        _value(item)
        if isinstance(item, PendingParameter | PendingBuffer)
        else type(item)(_values(item))
        if type(item) in (tuple, list)
        else item
        for item in given
    )


def _value(tensor: Tensor) -> Tensor:
    found = coming(tensor)
    if found is None:
        return tensor
    if found.value is None:
        found.gate.wait()
    return tensor if found.value is None else found.value


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    memo[id(tensor)] = copied = deepcopy(_value(tensor), memo)
    return copied


def is_awaitable(tensor: Tensor) -> bool:
    """Whether ``await_value`` can make it wait: neither a lazy one nor of a class that answers torch itself."""
    return (type(tensor) is Tensor or issubclass(type(tensor), nn.Parameter)) and not is_lazy(tensor)


def await_value(tensor: Tensor, gate: Gate, dtype: torch.dtype, device: torch.device) -> None:
    """Turn a placeholder into one that waits, in place, so that every reference to it does."""
    vars(tensor)[_KEY] = Coming(gate, dtype, device, type(tensor))
    tensor.__class__ = PendingParameter if isinstance(tensor, nn.Parameter) else PendingBuffer


def arrive(tensor: Tensor, value: Tensor) -> Tensor:
    """The value of one that waits has come: what is to stand in its place, nearly always itself.

    It is in its own memory (see ``fill``), or in another tensor's, which it becomes.
    """
    found = coming(tensor)
    assert found is not None
    if value is not tensor and not _swapped(tensor, value):
        value.__class__ = found.kind
        vars(value).update({name: kept for name, kept in vars(tensor).items() if name != _KEY})
        found.value = value
        return value
    tensor.__class__ = found.kind  # from here on others use it
    del vars(tensor)[_KEY]
    return tensor


def _swapped(tensor: Tensor, value: Tensor) -> bool:
    """Let ``tensor`` become ``value``; False where this torch cannot, or not with this tensor."""
    if _swap is None:
        return False
    try:
        _swap(tensor, value)
    except RuntimeError:  # code outside of Python refers to it: torch.jit, which was told to come later
        return False
    return True


def fill(tensor: Tensor, value: Tensor) -> bool:
    """Whether the tensor has it in its own memory, as with ``load_state_dict``: what is a view of it has it, too."""
    with nullcontext() if coming(tensor) is None else torch._C.DisableTorchFunctionSubclass():
        if tensor.is_meta or 0 in tensor.stride() or (tensor.dtype, tensor.device) != (value.dtype, value.device):
            return False
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():  # one that was made there is written there
            tensor.copy_(value)
        return True
