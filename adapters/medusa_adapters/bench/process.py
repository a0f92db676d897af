"""Processes that a benchmark starts: timed from exec, measured with their children, and never left behind."""

from __future__ import annotations

import ctypes
import http.client
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from medusa_runtime.errors import EngineError, MedusaError
from medusa_runtime.storage.base import redacted

_PR_SET_PDEATHSIG = 1
_GRACE_S = 10.0
_LAST_WORDS_S = 5.0  # from a connection's end to that of the process, which says why
_SHOWN_CHARACTERS = 1500


class Process:
    """One contestant, a context manager: it leads a process group of its own, and all of it is gone at the end.

    ``started_ns`` (CLOCK_MONOTONIC) is taken just before the exec. Its stderr is kept for the message when it fails.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        libc = ctypes.CDLL(None)

        def die_with_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

        self.command = command
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self.started_ns = time.monotonic_ns()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **(env or {})},
            preexec_fn=die_with_parent,
            process_group=0,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self) -> str:
        """The next line of its output. Raises MedusaError with the end of its stderr when there is none."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise self.failure("ended without an answer")
        return line.decode()

    def since_start_s(self) -> float:
        return (time.monotonic_ns() - self.started_ns) / 1e9

    def alive(self) -> bool:
        return self._process.poll() is None

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around requests to this process: a broken connection or stream is raised as MedusaError with its last words.

        An instance that fails closes its connections before it says why and ends, so it is given a moment for that.
        """
        try:
            yield
        except (OSError, http.client.HTTPException, ValueError, EngineError) as error:  # ValueError: half an event
            try:
                self._process.wait(_LAST_WORDS_S)
            except subprocess.TimeoutExpired:
                pass
            raise self.failure(f"did not answer as expected ({error})") from error

    def failure(self, what: str) -> MedusaError:
        """The error to raise for this process: what went wrong, whether it still runs and the end of its stderr."""
        said = os.pread(self._errors.fileno(), os.fstat(self._errors.fileno()).st_size, 0).decode(errors="replace")
        status = self._process.poll()
        state = "still running" if status is None else f"status {status}"
        last = said.strip()[-_SHOWN_CHARACTERS:] or "it wrote no error"
        return MedusaError(f"`{' '.join(map(redacted, self.command))[:200]}` {what} ({state}): {last}")

    def tree(self) -> list[int]:
        """This process and all that descend from it."""
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        tree = self.tree() if self.alive() else []
        if self.alive():
            self._process.terminate()
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                pass
        for pid in [*tree, self.pid]:
            # Descendants may have left the group; those that still are this process's are ended by their id.
            if pid != self.pid or self.alive():
                _kill(pid)
        self._process.wait()
        # What still runs takes memory, and a part of the next sample's CPUs.
        deadline = time.monotonic() + _GRACE_S
        while any(_runs(pid) for pid in tree) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert self._process.stdout
        self._process.stdout.close()
        self._errors.close()


def pss_bytes(pids: Sequence[int]) -> int:
    """Memory of these processes together: what they share counts once (each page is split among those who map it)."""
    return sum(_smaps(pid, "Pss:") for pid in pids)


def rss_bytes(pids: Sequence[int]) -> int:
    """The sum of their resident sets: shared pages count once for each process."""
    return sum(_smaps(pid, "Rss:") for pid in pids)


def _smaps(pid: int, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
