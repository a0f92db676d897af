"""Fresh processes that wait for one request each, and what they answer and take."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
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
_WATCH_EVERY_S = 0.02
_TIMEOUT_S = 600.0


class Inference(NamedTuple):
    """Seconds from the request to the output; the memory is 0 unless it was watched."""

    seconds: float
    digest: str
    stages: list[Stage]
    peak_mb: float = 0.0
    added_mb: float = 0.0


class Container:
    """A process with everything imported, that waits for its one request. A context manager."""

    def __init__(self, scratch: Path) -> None:
        environment = {**os.environ, "MEDUSA_BENCH_SCRATCH": str(scratch)}
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
        with suppress(OSError):
            assert self._process.stdin
            self._process.stdin.close()
        if kind is not None:
            self._process.kill()
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
        before = pss_mb(self._process.pid) if watch else 0.0
        resident = status_mb(self._process.pid, "VmRSS") if watch else 0.0
        self._process.stdin.write(json.dumps(asdict(request)) + "\n")
        self._process.stdin.flush()
        peak = self._watch(before) if watch else 0.0
        line = self._line()
        try:
            found = json.loads(line)
        except ValueError:
            raise self._failure(f"{request.model}/{request.strategy} failed") from None
        stages = [Stage(*stage) for stage in found["stages"]]
        added = status_mb(self._process.pid, "VmHWM") - resident if watch else 0.0
        return Inference(found["seconds"], found["digest"], stages, peak, added)

    def _watch(self, peak: float) -> float:
        deadline = time.monotonic() + _TIMEOUT_S
        assert self._process.stdout
        while not select.select([self._process.stdout], [], [], _WATCH_EVERY_S)[0]:
            peak = max(peak, pss_mb(self._process.pid))
            if time.monotonic() > deadline:
                raise self._failure(f"gave no answer within {_TIMEOUT_S:.0f} s")
        return max(peak, pss_mb(self._process.pid))

    def _line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def _failure(self, what: str) -> MedusaError:
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        return MedusaError(f"a sample's process {what}: {self._errors.read().strip()[-1500:] or 'no message'}")


def pss_mb(process: int) -> float:
    """Proportional memory of a process and its children, mapped files included, in MB (10^6 bytes)."""
    total_kb = 0
    for number in (process, *_children(process)):
        with suppress(OSError):
            for line in Path(f"/proc/{number}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total_kb += int(line.split()[1])
    return total_kb * 1024 / 1e6


def status_mb(process: int, key: str) -> float:
    """A size from a process's status, in MB (10^6 bytes)."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024 / 1e6


def _children(process: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []
