"""A KV cache that takes memory as it is used, instead of being zeroed before the first request."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_LEAST_BYTES = 16 << 20
_MAP_NORESERVE = 0x4000  # Linux; Python's mmap names it from 3.13 on
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


class LazyZeros(TorchFunctionMode):
    """A context in which a large ``torch.zeros`` of bytes on the CPU is memory that the kernel zeroes at its first use.

    torch.zeros writes its zeros: 2 s for a 1 GiB cache of which the first request uses a few blocks.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        size = args[0] if len(args) == 1 and type(args[0]) is int else 0
        on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if func is torch.zeros and size >= _LEAST_BYTES and kwargs.get("dtype") is torch.int8 and on_cpu:
            return torch.frombuffer(mmap.mmap(-1, size, flags=_FLAGS), dtype=torch.int8)
        return func(*args, **kwargs)
