"""Construct a model without memory or initial values for its parameters (Cicada's MiniLoader, §3.2).

Cicada shrinks each placeholder to one bit a value and skips its initialisation. Here a placeholder has no memory at
all: it is a tensor on torch's meta device, which has a shape and a dtype and nothing else.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors

from medusa_runtime.kernels.tensor_metadata import METADATA, is_in_place
from medusa_runtime.load.aliasing import use_count

_FACTORIES = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})
_RANDOM = frozenset({torch.rand, torch.randn})
# Not in an interpreter without its lock.
_COUNTS_EXACTLY = sys.implementation.name == "cpython" and "t" not in sys.abiflags
_LARGEST_SEED = 1 << 32  # the largest that people set; torch's own seed, different in each process, has 53 bits
_DESCRIBING = frozenset({"size", "dtype", "layout", "memory_format"})  # arguments of a factory that describe its result
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # equal to the called setter, not the same object


@contextmanager
def skeleton() -> Iterator[MetaFactoryMode]:
    """Give code that constructs modules parameters on the meta device, in this thread, while the context is open.

    ``nn.Parameter`` of a fresh ``torch.empty``, ``zeros``, ``ones``, ``full``, ``rand`` or ``randn`` takes no memory,
    and initialising it (``nn.init``, ``reset_parameters``, in-place methods) does nothing. Everything else is computed
    as usual. Buffers have their values, and so does a parameter made from a computed tensor (``scale *
    torch.randn(…)``), until a loader replaces it. Random numbers differ from those of an ordinary construction if
    earlier ones were not drawn; see ``drew_others``.
    """
    with MetaFactoryMode() as mode:
        yield mode
    mode.settle()


class MetaFactoryMode(TorchFunctionMode):
    """Makes torch's factories return placeholders: meta tensors that become real when code needs their values."""

    def __init__(self) -> None:
        super().__init__()
        self._random_state: Tensor | None = None  # the generator's, when a draw was skipped for the first time
        # Holds the placeholders, so that their ids are not reused. Nothing else refers to the first one; see settle.
        unused = torch.empty(0, device="meta")
        self._made: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {id(unused): (unused, lambda: torch.empty(0))}
        self._computed: list[weakref.ref[Tensor]] = []  # computed from parameters, and so without values
        self._shared = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and str(kwargs["device"]) == "meta" and not any(isinstance(one, Tensor) for one in args):
            # Drop device="meta": parameters get no memory anyway, and buffers need their values.
            kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        if func in _FACTORIES:
            return self._make(func, args, kwargs)
        if func in METADATA:
            return func(*args, **kwargs)
        target = kwargs.get("out", args[0] if args else kwargs.get("tensor"))
        if type(target) is nn.Parameter:
            if func == _SET_DATA and (target.is_meta or args[1].is_meta):
                _empty(target, args[1])
                return None
            if "out" in kwargs or is_in_place(func):
                self._skip()
                _empty(target)
                return target
            if target.is_meta and func is Tensor.new_tensor:  # nn.init.trunc_normal_ reads its bounds back from this
                return func(torch.empty(0, dtype=target.dtype), *args[1:], **kwargs)
        elif func is Tensor.__bool__ and args[0].is_meta and id(args[0]) not in self._made and _called_by_init():
            return False  # trunc_normal_ again: it looks for values out of bounds, and there are no values
        for value in (*args, *kwargs.values()):
            for item in value if type(value) in (tuple, list) else (value,):
                if type(item) is Tensor and id(item) in self._made:
                    self._make_real(item)
        return self._noted(func(*args, **kwargs))

    def _noted(self, result: Any) -> Any:
        for item in result if type(result) in (tuple, list) else (result,):
            if isinstance(item, Tensor) and not isinstance(item, nn.Parameter) and item.is_meta:
                self._computed.append(weakref.ref(item))
        return result

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if kwargs.get("out") is not None or kwargs.get("requires_grad"):
            return _tensor(func(*args, **kwargs))
        if func is torch.full:
            placeholder = _tensor(func(*args, **kwargs | {"device": "meta"}))
        else:
            placeholder = torch.empty(*args, **{k: v for k, v in kwargs.items() if k in _DESCRIBING}, device="meta")
        self._made[id(placeholder)] = placeholder, lambda: _tensor(func(*args, **kwargs))
        if func in _RANDOM:
            self._skip()
        return placeholder

    def _skip(self) -> None:
        if self._random_state is None:
            self._random_state = torch.get_rng_state()

    @property
    def drew_others(self) -> bool:
        """Whether code with a known seed drew other random numbers than it would have drawn without this mode."""
        if self._random_state is None or torch.initial_seed() > _LARGEST_SEED:
            return False
        return not torch.equal(self._random_state, torch.get_rng_state())

    def _make_real(self, placeholder: Tensor) -> None:
        _, make = self._made.pop(id(placeholder))
        _swap(placeholder, make())

    def settle(self) -> None:
        """Give values to the placeholders that code keeps as something other than a parameter, such as a buffer."""
        placeholders = list(map(itemgetter(0), self._made.values()))  # the first is the unused one
        if _COUNTS_EXACTLY:
            # Not in a loop: its variable is a counted reference in some versions of Python only.
            counts = list(map(sys.getrefcount, placeholders))
            kept = [one for one, count in zip(placeholders, counts, strict=True) if count > counts[0]]
        else:
            kept = placeholders[1:]
        alone = use_count(placeholders[0])
        for placeholder in kept:
            users = use_count(placeholder)
            self._shared |= users is None or alone is None or users > alone  # a parameter was made of it
            self._make_real(placeholder)
        self._made.clear()

    @property
    def keeps_views(self) -> bool:
        """Whether the code keeps a view of a parameter, or a tensor computed from one. Valid only after the context."""
        if any(ref() is not None for ref in self._computed):
            gc.collect()  # it may only be held by a cycle
        return self._shared or any(ref() is not None for ref in self._computed)


def _called_by_init() -> bool:
    """Return whether the caller is nn.init, which inspects what it has just filled. Others need the true value."""
    return sys._getframe(2).f_globals.get("__name__") == "torch.nn.init"


def _swap(here: Tensor, there: Tensor) -> None:
    swap_tensors(here, there)  # type: ignore[no-untyped-call]


def _empty(parameter: nn.Parameter, like: Tensor | None = None) -> None:
    """Turn a parameter, however it was made, into a placeholder without memory."""
    if like is not None or not parameter.is_meta:
        like = parameter if like is None else like
        _swap(parameter, nn.Parameter(torch.empty_like(like, device="meta"), parameter.requires_grad))


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value
