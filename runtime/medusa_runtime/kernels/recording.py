"""Programs: what a module computes, recorded as calls of our kernels that run without the interpreter (program.c).

As with CUDA graphs, the recorded calls must not depend on values. A module is recorded only if it does nothing but make
views, add, and call our kernels, all on known tensors: its inputs, its parameters, the KV cache, and its own results. A
function mode notices anything else that it does in torch. (A dispatch mode would notice more, but its first use imports
torch's compiler, which takes seconds.)
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from medusa_runtime.kernels import native

_KINDS = ("_products", "_norm", "_rope", "_gate", "_write_kv", "_add", "_attention")  # the enum in program.c
_ALIGNED = 64
_one_at_a_time = threading.Lock()  # a recording replaces the kernels' functions
# What else a module may do with tensors: look at anything but their values, and make views.
_LOOKS = frozenset(
    {"__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "numel", "size", "stride"}
)  # fmt: skip
_VIEWS = frozenset(
    {
        "__getitem__",
        "chunk",
        "contiguous",
        "flatten",
        "reshape",
        "split_with_sizes",
        "transpose",
        "unbind",
        "unsqueeze",
        "view",
    }
)


class _Call(ctypes.Structure):
    """struct call in program.c."""

    _fields_: ClassVar = [
        ("more", ctypes.c_void_p),
        ("places", ctypes.c_size_t * 5),
        ("numbers", ctypes.c_long * 8),
        ("reals", ctypes.c_float * 2),
        ("kind", ctypes.c_int),
        ("dtype", ctypes.c_int),
    ]


class Program:
    """Recorded calls that can be run again.

    Each run gets the addresses of its inputs, in the order of the recording.
    """

    def __init__(self, run: Any, calls: list[_Call], result: Tensor, held: list[Any]) -> None:
        self._run = run
        self._calls = (_Call * len(calls))(*calls)
        self._result = result
        self._held = held  # keeps alive what the calls point to

    def __call__(self, inputs: Any) -> Tensor:
        """Run the calls and return a copy of the result.

        ``inputs`` [native.INPUTS] are null, the stride of the block tables, and the addresses of the recording's
        inputs. Raises MemoryError if there is no memory for scratch space.
        """
        if self._run(self._calls, len(self._calls), inputs, torch.get_num_threads()):
            raise MemoryError("no memory for the scratch space of a step")
        return self._result.clone()


class Recorder(TorchFunctionMode):
    """Records the calls of kernels that this thread makes while it is entered.

    Tensors made meanwhile lie in ``arena`` (uint8), from its start on. Programs that do not run at the same time may
    share one. ``inputs`` are the addresses of the module's inputs; in a run they are given from number 2 on.
    ``constants`` are tensors that stay where they are.
    """

    def __init__(
        self, kernels: native.NativeKernels, arena: Tensor, inputs: Iterable[int], constants: Iterable[Tensor]
    ) -> None:
        super().__init__()
        self._kernels = kernels
        self._arena = arena
        self._used = 0
        self._inputs = {address: number for number, address in enumerate(inputs, 2)}
        self._ranges = [
            (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
            for tensor in (arena, *constants)
            if not hasattr(tensor, "codes")
        ]
        self._thread = threading.get_ident()
        self._calls: list[_Call] = []
        self._held: list[Any] = []
        self._known = True

    @property
    def is_short(self) -> bool:
        """Whether the arena was too small."""
        return self._used > self._arena.nbytes

    def __enter__(self) -> Recorder:
        _one_at_a_time.acquire()
        for kind, name in enumerate(_KINDS):
            setattr(self._kernels, name, self._recorded(kind, getattr(self._kernels, name)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for name in _KINDS:
            setattr(self._kernels, name, getattr(self._kernels, name).__wrapped__)
        _one_at_a_time.release()

    def program(self, result: Any) -> Program | None:
        """Return what was recorded, with its result; None if it cannot be run again."""
        if not self._known or not isinstance(result, Tensor) or not result.is_contiguous():
            return None
        if not self._ranges[0][0] <= result.data_ptr() < self._ranges[0][1]:
            return None
        return Program(self._kernels.run, self._calls, result, [*self._held, self._arena])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.new_empty and not kwargs:
            return self._take(args[1:] if isinstance(args[1], int) else args[1], args[0].dtype)
        if func is torch.empty and kwargs.keys() == {"dtype"}:
            return self._take(args[0], kwargs["dtype"])
        if func in (Tensor.add, Tensor.__add__, torch.add) and not kwargs and _addable(*args):
            out = self._take(args[0].shape, args[0].dtype)
            self._kernels.add(args[0], args[1], out)
            return out
        found = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _VIEWS or (name in _LOOKS and isinstance(found, Tensor)):
            places = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, Tensor)}
            made = found if isinstance(found, (tuple, list)) else (found,)
            self._known &= all(one.untyped_storage().data_ptr() in places for one in made)
        elif name not in _LOOKS:
            self._known = False
        return found

    def _take(self, shape: Any, dtype: torch.dtype) -> Tensor:
        begin = self._used
        size = math.prod(shape) * dtype.itemsize
        self._used += -(-size // _ALIGNED) * _ALIGNED
        if self.is_short:
            self._known = False
            return torch.empty(shape, dtype=dtype)
        return self._arena[begin : begin + size].view(dtype).view(shape)

    def _recorded(self, kind: int, function: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if threading.get_ident() == self._thread:
                self._record(kind, function.argtypes, arguments)
            return function(*arguments)

        call.__wrapped__ = function  # type: ignore[attr-defined]
        return call

    def _record(self, kind: int, types: Any, arguments: tuple[Any, ...]) -> None:
        call = _Call(kind=kind)
        places: list[int | None] = []
        numbers: list[int] = []
        reals: list[float] = []
        integers: list[int] = []
        for argument, type_ in zip(arguments, types, strict=True):
            if isinstance(argument, (ctypes.Array, ctypes.Structure)):
                call.more = ctypes.addressof(argument)
                self._held.append(argument)
                places += self._inside(argument)
            else:
                lists: dict[Any, list[Any]] = {
                    ctypes.c_void_p: places, ctypes.c_long: numbers, ctypes.c_float: reals, ctypes.c_int: integers
                }  # fmt: skip
                lists[type_].append(argument)
        if integers:
            *others, call.dtype, _threads = integers
            numbers += others
        for place, address in enumerate(places):
            call.places[place] = self._place(address)
        call.numbers[: len(numbers)] = numbers
        call.reals[: len(reals)] = reals
        self._calls.append(call)

    def _inside(self, argument: Any) -> list[int | None]:
        """Return the addresses in a structure that each run gives anew, after a check that the others are constant."""
        if isinstance(argument, ctypes.Structure):
            job: Any = argument
            for address in (job.keys.data, job.values.data, job.sinks):
                self._check(address)
            return [job.q, job.out, job.block_tables, job.sequences, job.contexts]
        for part in argument:
            self._check(part.weight)
            self._check(part.bias)
        return []

    def _place(self, address: int | None) -> int:
        if address in self._inputs:
            return self._inputs[address]
        self._check(address)
        return address or 0

    def _check(self, address: int | None) -> None:
        if address is not None and not any(begin <= address < end for begin, end in self._ranges):
            self._known = False


def _addable(*tensors: Any) -> bool:
    """Return whether two tensors are contiguous, of one shape and dtype, and fill whole vectors of our kernels."""
    if len(tensors) != 2 or not all(isinstance(tensor, Tensor) and tensor.is_contiguous() for tensor in tensors):
        return False
    one, other = tensors
    return (
        one.shape == other.shape
        and one.dtype is other.dtype
        and one.dtype in native.DTYPES
        and one.is_cpu
        and one.numel() % native.LANES == 0
    )


__all__ = ["Program", "Recorder"]
