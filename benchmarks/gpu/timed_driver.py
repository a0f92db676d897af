"""The CUDA driver with a clock: how long each of its functions takes in a restore of graphs, and when.

Functions that Python calls are measured here, and those that compiled code calls tens of thousands of times in
``timed_calls.c``, which adds about 50 ns to each.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any

from medusa_runtime.device.compiling import compile_library
from medusa_runtime.state.graphs.compiled import CALLS
from medusa_runtime.state.graphs.driver import CudaDriver

_SOURCE = Path(__file__).with_name("timed_calls.c")


class TimedDriver(CudaDriver):
    """A driver that measures itself. Raises DeviceError if there is no C compiler."""

    def __init__(self, file: str) -> None:
        super().__init__(file)
        self._began = time.perf_counter()
        self._spent: dict[str, list[tuple[float, float]]] = {}
        self._lock = Lock()
        with compile_library(_SOURCE) as library:
            self._timed = ctypes.CDLL(str(library))
        self._timed.medusa_timed_set.argtypes = (ctypes.c_int, ctypes.c_void_p)
        for name in ("medusa_timed_calls", "medusa_timed_ns"):
            getattr(self._timed, name).restype = ctypes.c_uint64
        for number, name in enumerate(CALLS):
            self._timed.medusa_timed_set(number, self.address(name))

    def bind(self, function: str) -> Any:
        return getattr(self._timed, f"timed_{function}") if function in CALLS else super().bind(function)

    def result(self, function: str, *arguments: Any) -> int:
        began = time.perf_counter()
        found = super().result(function, *arguments)
        with self._lock:
            self._spent.setdefault(function, []).append((began - self._began, time.perf_counter() - self._began))
        return found

    def times(self) -> dict[str, dict[str, float]]:
        """Return, for each function that was called, the calls and their seconds, the longest first.

        The seconds of several threads are added up. ``from_s`` and ``to_s``: when the first call began and the last one
        ended, in seconds since this object was made; not for the functions that compiled code calls.
        """
        return dict(sorted(self._times(), key=lambda one: -one[1]["seconds"]))

    def _times(self) -> Iterator[tuple[str, dict[str, float]]]:
        for name, spans in self._spent.items():
            seconds = sum(end - began for began, end in spans)
            yield name, {"calls": len(spans), "seconds": seconds, "from_s": spans[0][0], "to_s": spans[-1][1]}
        for number, name in enumerate(CALLS):
            if count := self._timed.medusa_timed_calls(number):
                yield name, {"calls": count, "seconds": self._timed.medusa_timed_ns(number) / 1e9}


__all__ = ["TimedDriver"]
