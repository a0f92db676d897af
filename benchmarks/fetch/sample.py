"""Samples. For each, one client runs once in a fresh child process, whose memory is watched from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from medusa_runtime.errors import MedusaError, MissingPackageError

from benchmarks.fetch.client import MISSING_PACKAGE, Job
from benchmarks.fetch.peers import INSTALL, environment

_TIMEOUT_S = 300.0
_WATCH_EVERY_S = 0.01


class Sample(NamedTuple):
    """The bandwidth in MB/s (10^6 bytes), the client's CPU seconds per GB, and its most private memory in MB.

    ``crc`` is the CRC-32 of the data, if the job asked to verify it.
    """

    mb_per_s: float
    cpu_s: float
    private_mb: float
    crc: int | None


@dataclass(frozen=True)
class Contestant:
    """A row: the client ``client`` of the module ``benchmarks.fetch.<module>``, run by the interpreter ``python``."""

    name: str
    module: str
    client: str
    threads: int = 2
    fresh: bool = False
    python: str = sys.executable

    def sample(self, job: Job) -> Sample:
        """Fetch ``job`` once. Raises MissingPackageError if the peer is not installed, MedusaError if it fails."""
        with tempfile.TemporaryDirectory() as folder, self.start(job, Path(folder)) as child:
            try:
                private_mb = _watch(child)
                output, complaint = child.communicate()
            finally:
                child.kill()
        if child.returncode == MISSING_PACKAGE and self.name in INSTALL:
            raise MissingPackageError(
                f"{self.name} is not installed for {self.python}: pip install {INSTALL[self.name]}, "
                f"or name an interpreter that has it: --peer-python {self.name}=PATH"
            )
        if child.returncode:
            raise MedusaError(f"{self.name} ended with {child.returncode}: {complaint.strip()[-800:] or 'no message'}")
        found = json.loads(output.splitlines()[-1])
        return Sample(
            job.size_bytes / found["seconds"] / 1e6, found["cpu_s"] / job.size_bytes * 1e9, private_mb, found["crc"]
        )

    def start(self, job: Job, folder: Path) -> subprocess.Popen[str]:
        """Start the child process. ``folder`` must be empty, and must outlive it."""
        # Another interpreter must find these modules and nothing else of ours. So its path is a folder with one link.
        (folder / "benchmarks").symlink_to(Path(__file__).parents[1])
        others = os.environ.get("PYTHONPATH") if self.python == sys.executable else None
        path = {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), others)))}
        return subprocess.Popen(
            [self.python, "-m", f"benchmarks.fetch.{self.module}", self.client, json.dumps(asdict(job))],
            env={**os.environ, **environment(job), **path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def _watch(child: subprocess.Popen[str]) -> float:
    """Wait for the child's end. Return the most anonymous memory that was seen, in MB. Shared memory does not count."""
    peak_kb, deadline = 0, time.monotonic() + _TIMEOUT_S
    status = Path(f"/proc/{child.pid}/status")
    while child.poll() is None:
        if time.monotonic() > deadline:
            raise MedusaError(f"a client did not end within {_TIMEOUT_S:.0f} s")
        for line in status.read_text().splitlines():
            if line.startswith("RssAnon:"):
                peak_kb = max(peak_kb, int(line.split()[1]))
        time.sleep(_WATCH_EVERY_S)
    return peak_kb * 1024 / 1e6
