"""Measure how fast a thread copies bytes of a region that another process has written: from a mapping, or by reading.

    python -m benchmarks.fetch.region_reads --json region-reads.json

This is what the threads do that bring weights to a GPU (``load/upload/staging.py``), with 4 MiB at a time. The mapping
is new each time, as an engine's is. No GPU is needed.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

from medusa_adapters.bench.result import Result
from medusa_runtime.region.pages import address_of

_PART_BYTES = 4 << 20


def mapped(file: int, size_bytes: int, buffer: memoryview) -> None:
    with mmap.mmap(file, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
        view, target = memoryview(memory), address_of(buffer)
        source = address_of(view)
        for start in range(0, size_bytes, _PART_BYTES):
            ctypes.memmove(target, source + start, _PART_BYTES)
        view.release()


def read(file: int, size_bytes: int, buffer: memoryview) -> None:
    for start in range(0, size_bytes, _PART_BYTES):
        got = os.preadv(file, [buffer], start)
        assert got == _PART_BYTES


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=1024, help="of the region, a multiple of 4")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    size_bytes = arguments.mb << 20
    file = os.memfd_create("region")
    for _ in range(size_bytes // _PART_BYTES):
        os.write(file, os.urandom(4096) * (_PART_BYTES // 4096))
    buffer = memoryview(mmap.mmap(-1, _PART_BYTES, mmap.MAP_PRIVATE | mmap.MAP_POPULATE))
    ways: dict[str, Callable[[int, int, memoryview], None]] = {"mapped": mapped, "read": read}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(arguments.runs):
        for name in list(ways)[:: 1 if run % 2 else -1]:
            began, used = time.perf_counter(), _cpu_s()
            ways[name](file, size_bytes, buffer)
            seconds[name].append((time.perf_counter() - began) * 1e9 / size_bytes)
            cpu[name].append((_cpu_s() - used) * 1e9 / size_bytes)
    result = Result()
    for name in ways:
        result.add(name, "wall", "s/GB", seconds[name])
        result.add(name, "cpu", "s/GB", cpu[name])
    print(result.table())
    print(f"\nread / mapped, CPU time: {result.ratio('cpu', 'read', 'mapped'):.2f}")
    if arguments.json is not None:
        result.write(arguments.json)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
