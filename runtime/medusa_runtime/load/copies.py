"""The memory that a load takes beside the region: that of the tensors which the module gets as copies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from medusa_runtime.checkpoint.index import TensorEntry, WeightIndex
from medusa_runtime.container_limits import memory_available_bytes
from medusa_runtime.errors import TooLargeError
from medusa_runtime.load.applier import Applier
from medusa_runtime.load.plan import Place
from medusa_runtime.load.views import DTYPES

if TYPE_CHECKING:
    from medusa_runtime.load.quantized.tensors import DequantizedIndex

_SMALL_BYTES = 64 << 20  # the fetch leaves room for so many (``fetch/prefetcher.py``)
_PATIENCE_S = 3.0  # for the memory of a process that was killed, which the kernel frees bit by bit
_LOOK_S = 0.1


def check_memory(copied: int, to_come_bytes: int, *, is_first: bool, check: Callable[[], None]) -> None:
    """Raise TooLargeError if the ``copied`` bytes of weights exceed the free memory.

    ``to_come_bytes`` is what the fetch will take meanwhile. Unless this load is the first one, the process of another
    may just have been killed. ``check`` is called repeatedly, and may raise.
    """
    deadline = time.monotonic() + (0.0 if is_first else _PATIENCE_S)
    while copied > _SMALL_BYTES and copied + to_come_bytes > (available := memory_available_bytes()):
        check()
        if time.monotonic() > deadline:
            raise TooLargeError(
                f"{_mb(copied)} of the weights have to be copied, to another dtype or to addresses that products need, "
                f"but only {_mb(max(available - to_come_bytes, 0))} of memory are available; expected a larger "
                "container, or a file of the module's dtype with aligned tensors (medusa materialize --convert)"
            )
        time.sleep(_LOOK_S)


def copied_bytes(index: WeightIndex, todo: Mapping[str, Place], applier: Applier) -> int:
    """Return how many bytes an applier copies of the tensors of its plan, ``todo``, in the host's memory."""
    copied = 0
    for name, place in todo.items():
        entry = index.tensors[name]
        if applier.quantization is not None and name in (quantized := _quantized(index)).stored:
            keep_codes = applier.takes_codes(place)
            copied += quantized.made_bytes(name, applier.unquantized_dtype, keep_codes=keep_codes)
        elif applier.quantization is not None and applier.quantization.is_changed(name):
            copied += math.prod(entry.shape) * applier.unquantized_dtype.itemsize
        elif entry.dtype in DTYPES:
            copied += applier.copied_bytes(place, DTYPES[entry.dtype], entry.shape, low_address(index, entry))
    return copied


def _quantized(index: WeightIndex) -> DequantizedIndex:
    from medusa_runtime.load.quantized.tensors import DequantizedIndex

    assert isinstance(index, DequantizedIndex)
    return index


def low_address(index: WeightIndex, entry: TensorEntry) -> int:
    """Return a number with the low bits of the address at which a view of a tensor lies.

    A local file is mapped from its beginning, and the data sections of others start on pages.
    """
    shard = index.shards[entry.shard]
    return entry.start if shard.path is None else shard.data_start + entry.start


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"


__all__ = ["check_memory", "copied_bytes", "low_address"]
