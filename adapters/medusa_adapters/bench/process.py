"""Child processes that are timed from exec, measured with their children, and never left behind."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self

from medusa_runtime.errors import EngineError, MedusaError
from medusa_runtime.process import die_with_parent
from medusa_runtime.storage.base import redacted

_SCHEDULER_CLOCK = 2
_GONE_S = 10.0  # from SIGKILL to the end
_LEAVE_S = 15.0  # for descendants of a process that has ended, some of which remove its files and shared memory
_LAST_WORDS_S = 5.0  # from a connection's end to that of the process, which says why
_SHOWN_CHARACTERS = 1500


class Process:
    """A child process with a process group of its own. As a context manager, it ends with all of its descendants.

    ``started_ns`` (CLOCK_MONOTONIC) is taken just before the exec. Its output is kept for the message when it fails:
    stderr alone, as ``line`` reads stdout, or both where ``log`` names a file to write them to. ``env`` is added to
    this process's environment; with ``inherit=False`` it is the whole environment. ``tied``: the child is killed when
    the thread that started it ends, so it is False in tests whose threads come and go.
    """

    grace_s = 10.0  # from SIGTERM to SIGKILL; 0 kills at once

    def __init__(
        self,
        command: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        *,
        inherit: bool = True,
        folder: Path | None = None,
        log: BinaryIO | None = None,
        tied: bool = True,
    ) -> None:
        self.command = [str(word) for word in command]
        self._output = log or tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self.started_ns = time.monotonic_ns()
        self.process = self.start(
            stdin=subprocess.DEVNULL,
            stdout=log or subprocess.PIPE,
            stderr=self._output,
            cwd=folder,
            env={**(os.environ if inherit else {}), **(env or {})},
            preexec_fn=partial(die_with_parent, os.getpid()) if tied else None,
            process_group=0,
        )

    def start(self, **options: Any) -> subprocess.Popen[bytes]:
        """Start the command; overridden where something else than its exec is wanted."""
        return subprocess.Popen(self.command, **options)

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        """Return the next line of its output. Raises MedusaError with the end of its stderr when there is none."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise self.failure("ended without an answer")
        return line.decode()

    def since_start_s(self) -> float:
        return (time.monotonic_ns() - self.started_ns) / 1e9

    def alive(self) -> bool:
        return self.process.poll() is None

    @contextmanager
    def explained_failures(self) -> Iterator[None]:
        """Turn an error of a connection or stream to this process into a MedusaError with the end of its output.

        A failing instance closes its connections before it prints why and ends, so wait a moment for that.
        """
        try:
            yield
        except (OSError, http.client.HTTPException, ValueError, EngineError) as error:  # ValueError: half an event
            try:
                self.process.wait(_LAST_WORDS_S)
            except subprocess.TimeoutExpired:
                pass
            raise self.failure(f"did not answer as expected ({error})") from error

    def failure(self, what: str) -> MedusaError:
        """Return the error to raise for this process: what went wrong, whether it still runs, the end of its stderr."""
        status = self.process.poll()
        state = "still running" if status is None else f"status {status}"
        last = self.output().strip()[-_SHOWN_CHARACTERS:] or "it wrote no error"
        return MedusaError(f"`{' '.join(map(redacted, self.command))[:200]}` {what} ({state}): {last}")

    def output(self) -> str:
        """Return its output so far: of stderr, and with a log of stdout as well."""
        # A positioned read: the file's position is the writer's.
        number = self._output.fileno()
        return os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace")

    def tree(self) -> list[int]:
        """Return the ids of this process and of all its descendants."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:
                    continue
                children.setdefault(parent, []).append(int(entry.name))
        found = [self.pid]
        for pid in found:
            found.extend(children.get(pid, ()))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process and all its descendants, and wait until they are gone. May be called twice."""
        if self._output.closed:
            return
        tree = self.tree() if self.alive() else []
        if self.alive() and self.grace_s:
            self.process.terminate()
            try:
                self.process.wait(self.grace_s)
            except subprocess.TimeoutExpired:
                pass
        if self.alive():
            _kill(self.pid)
        self.process.wait()
        _wait_gone(tree, _LEAVE_S)
        for pid in filter(runs, tree):  # what outlives its parent
            _kill(pid)
        # Processes that still run would take memory, and CPU time from the next sample.
        _wait_gone(tree, _GONE_S)
        if self.process.stdout:
            self.process.stdout.close()
        self._output.close()


def pss_bytes(pids: Sequence[int]) -> int:
    """Return the memory of these processes together. Shared pages count once: each is split among those that map it."""
    return sum(_smaps(pid, "Pss:") for pid in pids)


def rss_bytes(pids: Sequence[int]) -> int:
    """Return the sum of their resident sets: shared pages count once for each process."""
    return sum(_smaps(pid, "Rss:") for pid in pids)


def cpu_s(pids: Sequence[int]) -> dict[int, float]:
    """Return the CPU seconds that each of these processes has used so far; without those that have ended."""
    found = {}
    for pid in pids:
        with suppress(OSError):  # the clock is named as by clock_getcpuclockid(3)
            found[pid] = time.clock_gettime((~pid << 3) | _SCHEDULER_CLOCK)
    return found


def _smaps(pid: int, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def _wait_gone(pids: Sequence[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.005)


def runs(pid: int) -> bool:
    """Return whether a process has not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
