"""A device of host memory whose tensors cannot be mixed with the host's, as a GPU's cannot.

Its tensors say that they are on another device, and an operation on tensors of both raises RuntimeError. So a test
without a GPU finds a missing copy. Importing this module makes the device known to torch, which other code then takes
for the machine's accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_INDEXING = (_aten.index.Tensor, _aten.index_put_.default)  # these take indices of the host on a GPU, too


class Stream:
    """A stream on which everything has run when its call returns."""

    def wait_stream(self, other: Stream) -> None: ...

    def synchronize(self) -> None: ...


class Streams(_DummyBackendModule):
    """What torch.cuda is for a GPU, as far as it is used."""

    def Stream(self, device: torch.device) -> Stream:
        return Stream()

    current_stream = default_stream = Stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        yield


_setup_privateuseone_for_python_backend("strict", backend_module=Streams())
STRICT = torch.device("strict", 0)


class StrictTensor(Tensor):
    """A tensor on the device, over a tensor of the host."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> StrictTensor:
        with torch.inference_mode(False):  # a view of one that is not of inference mode must not be either
            made = torch.Tensor._make_wrapper_subclass(
                cls, host.size(), host.stride(), host.storage_offset(), dtype=host.dtype, device=STRICT
            )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})

    # These ask a tensor's storage, of which this one has none.

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    def tolist(self) -> Any:
        return self.host.tolist()

    def __repr__(self) -> str:
        return f"strict {self.host!r}"


def run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the host. Raises RuntimeError if its tensors are on two devices."""
    there: list[StrictTensor] = []
    here: list[Tensor] = []

    def on_host(value: Any) -> Any:
        if isinstance(value, StrictTensor):
            there.append(value)
            return value.host
        if isinstance(value, Tensor):
            if value.dim():
                here.append(value)
        elif isinstance(value, list | tuple):
            return [on_host(one) for one in value]
        return value

    device = kwargs.get("device")
    given = [on_host(value) for value in args]
    named = {name: on_host(value) for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    if there and here and function not in _COPIES and (function not in _INDEXING or args[0] is here[0]):
        raise RuntimeError(f"expected all tensors on one device, found two for {function}")
    out = function(*given, **named)
    if device is not None and torch.device(device).type == "cpu":
        return out.clone()  # not the device's own memory
    for one in there:
        if out is one.host:  # it was changed in place
            assert out.shape == one.shape, f"{function} has resized a tensor"
            return one
    return _on_device(out)


def _on_device(out: Any) -> Any:
    if isinstance(out, Tensor):
        return StrictTensor(out)
    return type(out)(map(_on_device, out)) if isinstance(out, list | tuple) else out


class MadeThere(TorchFunctionMode):
    """A context in which new tensors are made on the device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.tensor:  # torch does not make these on a device without C++
            return function(*args, **kwargs).to(STRICT)
        if function in _device_constructors():
            kwargs.setdefault("device", STRICT)
        return function(*args, **kwargs)


_all = torch.library.Library("_", "IMPL")
_all.fallback(lambda function, *args, **kwargs: run(function, args, kwargs), "PrivateUse1")
_some = torch.library.Library("aten", "IMPL")
for _name in ("arange", "arange.start", "arange.start_step"):  # torch makes an empty tensor, and resizes it
    _packet, _, _overload = _name.partition(".")
    _function = getattr(getattr(_aten, _packet), _overload or "default")
    _some.impl(_name, lambda *args, function=_function, **kwargs: run(function, args, kwargs), "PrivateUse1")


__all__ = ["STRICT", "MadeThere", "StrictTensor"]
