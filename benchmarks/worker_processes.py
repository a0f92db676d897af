"""Processes of ``medusa_cluster.group.worker``: how they are started, reached, ended, and what their timelines say."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from medusa_runtime.engine.client import EngineClient
from medusa_runtime.errors import EngineError
from medusa_runtime.timeline import Stage

_START_S = 60.0
_END_S = 20.0
_POLL_S = 0.002


class WorkerProcesses:
    """Workers of one model; a context manager that ends them. The first one that is started has rank 0, and so on."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="medusa-workers-")))
        self.processes: list[subprocess.Popen[bytes]] = []
        self.timelines: list[list[Stage]] = []  # by rank, once the workers have ended

    def start(
        self,
        model: str,
        flags: Sequence[str] = (),
        *,
        layers: str | None,
        plan: Mapping[str, Any] | None,
        environment: Mapping[str, str],
        popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
        **options: Any,
    ) -> None:
        """Start one more worker, for this range of layers or all. One without the plan of a group is an instance.

        ``options`` are further ones of ``popen``. Its output goes to a file.
        """
        rank = len(self.processes)
        command = [sys.executable, "-m", "medusa_cluster.group.worker", "--die-with-parent", "--model", model, *flags]
        command += ["--socket", str(self.folder / f"{rank}.sock")]
        command += ["--timeline", str(self.folder / f"{rank}.timeline")]
        command += ["--layers", layers] if layers is not None else []
        if plan is not None:
            command += ["--group", str(self.write_plan(rank, plan))]
        with (self.folder / f"{rank}.log").open("wb") as log:
            self.processes.append(popen(command, env=environment, **{"stdout": log, "stderr": log, **options}))

    def write_plan(self, rank: int, plan: Mapping[str, Any]) -> Path:
        """Write a worker's plan, or replace it while the worker runs."""
        path, new = self.folder / f"{rank}.json", self.folder / f"{rank}.new"
        new.touch(mode=0o600)
        new.write_text(json.dumps(plan))
        new.replace(path)
        return path

    def connect(self, rank: int) -> EngineClient:
        """Connect to a worker once it listens, which is before its weights are there."""
        path, deadline = self.folder / f"{rank}.sock", time.monotonic() + _START_S
        while not path.exists():
            self.check()
            if time.monotonic() > deadline:
                raise EngineError(f"worker {rank} did not start: {self.log(rank)}")
            time.sleep(_POLL_S)
        client = EngineClient(str(path))
        client.start()
        self.stack.callback(client.close)
        return client

    def check(self) -> None:
        """Raise EngineError if a worker has failed."""
        for rank, process in enumerate(self.processes):
            if process.poll():
                raise EngineError(f"worker {rank} ended with {process.returncode}: {self.log(rank)}")

    def log(self, rank: int) -> str:
        return (self.folder / f"{rank}.log").read_text(errors="replace")[-2000:]

    def end(self) -> None:
        """End the workers, and read their timelines."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        paths = [self.folder / f"{rank}.timeline" for rank in range(len(self.processes))]
        lines = [path.read_bytes().splitlines() if path.exists() else [] for path in paths]
        self.timelines = [[Stage(*json.loads(line)) for line in each] for each in lines]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, and remove their folder."""
        self.end()
        self.stack.close()
