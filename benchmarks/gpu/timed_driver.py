"""The CUDA driver with a clock: how long each of its functions takes in a restore of graphs, and when.

Functions that Python calls are measured here, and those that compiled code calls tens of thousands of times in
``timed_calls.c``, which adds about 50 ns to each.
"""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock, current_thread
from typing import Any, NamedTuple

from medusa_runtime.device.compiling import compile_library
from medusa_runtime.state.graphs.compiled import CALLS
from medusa_runtime.state.graphs.driver import CudaDriver

_SOURCE = Path(__file__).with_name("timed_calls.c")


class _Span(NamedTuple):
    """One call, in seconds since the driver object was made."""

    began: float
    end: float
    thread: str


class TimedDriver(CudaDriver):
    """A driver that measures itself. Raises DeviceError if there is no C compiler."""

    def __init__(self, file: str) -> None:
        super().__init__(file)
        self._spent: dict[str, list[_Span]] = {}
        self._compiled: Counter[str] = Counter()  # nanoseconds of each thread in calls of compiled code
        self._lock = Lock()
        with compile_library(_SOURCE) as library:
            self._timed = ctypes.CDLL(str(library))
        self._timed.medusa_timed_set.argtypes = (ctypes.c_int, ctypes.c_void_p)
        for name in ("medusa_timed_calls", "medusa_timed_ns", "medusa_timed_thread_ns"):
            getattr(self._timed, name).restype = ctypes.c_uint64
        for number, name in enumerate(CALLS):
            self._timed.medusa_timed_set(number, self.address(name))
        self._began = time.perf_counter()

    def bind(self, function: str) -> Any:
        return getattr(self._timed, f"timed_{function}") if function in CALLS else super().bind(function)

    def result(self, function: str, *arguments: Any) -> int:
        began = time.perf_counter()
        found = super().result(function, *arguments)
        span = _Span(began - self._began, time.perf_counter() - self._began, current_thread().name)
        with self._lock:
            self._spent.setdefault(function, []).append(span)
            if function == "cuGraphInstantiateWithParams":  # after the nodes of a graph
                self._compiled[span.thread] += self._timed.medusa_timed_thread_ns()
        return found

    def times(self) -> dict[str, dict[str, float]]:
        """Return, for each function that was called, the calls and their seconds, the longest first.

        The seconds of several threads are added up. ``from_s`` and ``to_s``: when the first call began and the last one
        ended, in seconds since this object was made; not for the functions that compiled code calls.
        """
        return dict(sorted(self._times(), key=lambda one: -one[1]["seconds"]))

    def threads(self) -> dict[str, dict[str, float]]:
        """Return for each thread that called the driver how long it was in there, and from when to when it did so."""
        spans = [span for spans in self._spent.values() for span in spans]
        found = {
            name: _sum([span for span in spans if span.thread == name]) for name in {span.thread for span in spans}
        }
        for name, spent_ns in self._compiled.items():
            found[name]["seconds"] += spent_ns / 1e9
        return dict(sorted(found.items()))

    def _times(self) -> Iterator[tuple[str, dict[str, float]]]:
        for name, spans in self._spent.items():
            yield name, {"calls": len(spans), **_sum(spans)}
        for number, name in enumerate(CALLS):
            if count := self._timed.medusa_timed_calls(number):
                yield name, {"calls": count, "seconds": self._timed.medusa_timed_ns(number) / 1e9}


def _sum(spans: Sequence[_Span]) -> dict[str, float]:
    seconds = sum(span.end - span.began for span in spans)
    return {"seconds": seconds, "from_s": min(span.began for span in spans), "to_s": max(span.end for span in spans)}


__all__ = ["TimedDriver"]
