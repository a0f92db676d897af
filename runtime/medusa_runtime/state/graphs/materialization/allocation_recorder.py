"""Offline: torch's allocations between the launches of captured graphs, for indirect index pointers (MEDUSA §4.1)."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from ctypes import c_size_t, c_uint64
from pathlib import Path
from typing import NamedTuple

from ....errors import DeviceError
from .trace import AllocationTrace

_SOURCE = Path(__file__).with_suffix(".cpp")
_ALLOC, _FREE_COMPLETED = 0, 2  # c10's TraceEntry::Action; a release counts when its memory can be given out again


class AllocatorEvent(NamedTuple):
    """``nodes``: how many the graph had that was being captured on the event's stream; 0 outside of a capture."""

    action: int
    address: int
    size: int
    nodes: int


class _Event(ctypes.Structure):
    _fields_ = (("action", c_uint64), ("address", c_uint64), ("size", c_uint64), ("nodes", c_uint64))


class AllocationRecorder:
    """Records while open, all devices. Compiles a few lines against torch's headers: needs a C++ compiler and torch for
    CUDA. DeviceError otherwise: then graphs are materialized all the same, by region and offset alone."""

    def __init__(self, folder: Path) -> None:
        """``folder``: where the compiled recorder may lie."""
        try:
            self._library = ctypes.CDLL(str(_compiled(folder)))
        except OSError as error:
            raise DeviceError(f"the allocation recorder cannot be loaded ({error}); expected torch for CUDA") from None
        self._library.medusa_allocations_read.restype = c_size_t
        self._library.medusa_allocations_read.argtypes = (ctypes.c_void_p, c_size_t)
        if code := self._library.medusa_allocations_start():
            raise DeviceError(f"the allocation recorder does not start ({code}); expected the driver of CUDA 12.4")

    def __len__(self) -> int:
        """How many events there are by now; to be asked before and after each capture."""
        return int(self._library.medusa_allocations_read(None, 0))

    def events(self) -> list[AllocatorEvent]:
        count = len(self)
        room = (_Event * max(count, 1))()
        self._library.medusa_allocations_read(room, count)
        return [AllocatorEvent(e.action, e.address, e.size, e.nodes) for e in room[:count]]

    def close(self) -> None:
        self._library.medusa_allocations_stop()


def trace_of(
    events: Sequence[AllocatorEvent], captures: Mapping[str, tuple[int, int]], nodes: Mapping[str, int]
) -> AllocationTrace:
    """``captures``: graph → numbers of the first event of its capture and of the first behind it, in the order of the
    captures; ``nodes``: graph → how many it has in the end, if it is wanted."""
    trace = AllocationTrace()
    position = 0
    for key, (start, stop) in captures.items():
        _add(trace, events[position:start])
        for event in events[start:stop]:
            if event.nodes:
                trace.launched(key, event.nodes)
            _add(trace, [event])
        trace.launched(key, nodes.get(key, 0))
        position = stop
    _add(trace, events[position:])
    return trace


def _add(trace: AllocationTrace, events: Iterable[AllocatorEvent]) -> None:
    for event in events:
        if event.action == _ALLOC:
            trace.malloc(event.address, event.size)
        elif event.action == _FREE_COMPLETED:
            trace.free(event.address)


def _compiled(folder: Path) -> Path:
    library = folder / "allocation_recorder.so"
    command = ["c++", "-std=c++20", "-O2", "-fPIC", "-shared", *(f"-I{path}" for path in _headers()), str(_SOURCE)]
    # Linked, though torch has it loaded: that was loaded for torch alone, and this would not find its symbols.
    command += ["-o", str(library), *(f"-L{path}" for path in _found("torch", "lib")), "-lc10_cuda", "-lc10", "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeviceError(f"expected a C++ compiler (c++) for the allocation recorder: {error}") from None
    if done.returncode:
        raise DeviceError(f"the allocation recorder does not compile: {done.stderr.strip()[:500]}")
    return library


def _headers() -> list[Path]:
    """Of torch, and of CUDA as torch's packages bring it."""
    return [*_found("torch", "include"), *_found("nvidia", "*/include"), Path("/usr/local/cuda/include")]


def _found(package: str, pattern: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations or () if spec is not None else ()
    return [path for folder in folders for path in sorted(Path(folder).glob(pattern))]
