"""Fresh processes that wait for one request each, and what they answer and take."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import NamedTuple, Self

from medusa_runtime.errors import MedusaError

from benchmarks.cicada.pipeline import Stage
from benchmarks.cicada.sample import Request

ROOT = Path(__file__).parents[2]
CONVERTED = "converted"  # a folder in a workload's own
_SERVED = ("full", CONVERTED, "floor")  # what our function's process does
_WATCH_EVERY_S = 0.02
_TIMEOUT_S = 600.0


class Memory(NamedTuple):
    """Memory of a sample's processes, in MB (10^6 bytes). ``added_``: what came with the request.

    ``peak``: proportional memory (PSS), mapped files included. ``used``: what ``free`` calls used, as Cicada measures
    (§4.3, Q2): anonymous and shared memory, without the page cache. ``added``: by the kernel's own high-water mark of
    the process, mapped files included.
    """

    peak_mb: float
    added_mb: float
    used_mb: float
    added_used_mb: float


class Inference(NamedTuple):
    """Seconds from the request to the output; the memory is empty unless it was watched."""

    seconds: float
    digest: str
    stages: list[Stage]
    memory: Memory | None = None


class Container:
    """A process with everything imported, that waits for its one request. A context manager.

    For our ``strategy`` it has imported torch as ``medusa serve`` has a handler import it, for others plainly.
    """

    def __init__(self, scratch: Path, strategy: str) -> None:
        served = "1" if strategy in _SERVED else ""
        environment = {**os.environ, "MEDUSA_BENCH_SCRATCH": str(scratch), "MEDUSA_BENCH_SERVED": served}
        self._errors = TemporaryFile("w+")  # noqa: SIM115  a pipe that nobody reads could stop the child
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.cicada.sample"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()
        self.close()

    def close(self) -> None:
        """End the process. May be called twice."""
        with suppress(OSError):
            assert self._process.stdin
            self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()
        self._errors.close()

    def wait_ready(self) -> None:
        if self._line() != "ready":
            raise self._failure("did not start")

    def infer(self, request: Request, *, watch: bool = False) -> Inference:
        """MedusaError with what the process said, when it failed. Watching memory slows it down."""
        assert self._process.stdin
        memory = None
        if watch:
            before, resident = self._sizes(), status_mb(self._process.pid, "VmRSS")
        self._process.stdin.write(json.dumps(asdict(request)) + "\n")
        self._process.stdin.flush()
        if watch:
            peak = self._watch(before)
        line = self._line()
        try:
            found = json.loads(line)
        except ValueError:
            raise self._failure(f"{request.model}/{request.strategy} failed") from None
        if watch:
            added = status_mb(self._process.pid, "VmHWM") - resident
            memory = Memory(peak.pss_mb, added, peak.used_mb, peak.used_mb - before.used_mb)
        return Inference(found["seconds"], found["digest"], [Stage(*stage) for stage in found["stages"]], memory)

    def _watch(self, peak: Sizes) -> Sizes:
        deadline = time.monotonic() + _TIMEOUT_S
        assert self._process.stdout
        while not select.select([self._process.stdout], [], [], _WATCH_EVERY_S)[0]:
            peak = peak.most(self._sizes())
            if time.monotonic() > deadline:
                raise self._failure(f"gave no answer within {_TIMEOUT_S:.0f} s")
        return peak.most(self._sizes())

    def _sizes(self) -> Sizes:
        return sizes(self._process.pid)

    def _line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def _failure(self, what: str) -> MedusaError:
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        return MedusaError(f"a sample's process {what}: {self._errors.read().strip()[-1500:] or 'no message'}")


class Sizes(NamedTuple):
    """Memory of a process and its children at one moment, in MB (10^6 bytes); see Memory."""

    pss_mb: float
    used_mb: float

    def most(self, other: Sizes) -> Sizes:
        return Sizes(max(self.pss_mb, other.pss_mb), max(self.used_mb, other.used_mb))


def sizes(process: int) -> Sizes:
    found: dict[str, int] = defaultdict(int)
    for number in (process, *_children(process)):
        with suppress(OSError):
            for line in Path(f"/proc/{number}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss"):
                    key, kilobytes, _ = line.split()
                    found[key] += int(kilobytes) * 1024
    return Sizes(found["Pss:"] / 1e6, (found["Pss_Anon:"] + found["Pss_Shmem:"]) / 1e6)


def status_mb(process: int, key: str) -> float:
    """A size from a process's status, in MB (10^6 bytes)."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024 / 1e6


def _children(process: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []
