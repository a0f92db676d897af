"""`medusa serve` in a process of its own: for tests, for benchmarks and for `medusa materialize`."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from medusa_runtime.errors import MedusaError, from_code
from medusa_runtime.timeline import Stage

from .openai_client import Completion, stream
from .process import Process

_LISTENING = "listening on "
_RETRY_S = 0.002
_START_TIMEOUT_S = 600.0


class HttpResponse(NamedTuple):
    """A whole HTTP response; header names are compared without regard to case."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class ServedInstance(Process):
    """A server in a process of its own, from its exec until nothing of it is left; a context manager.

    ``command`` is that of `medusa serve` (see ``serve_command``), which prints the port that it found free, or of
    another server, on the given ``port``. Requests may be sent at once: they wait until the port accepts. Stdout and
    stderr go to ``log``, a file of the caller's, or to a temporary one. See Process for the other parameters.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        *,
        port: int | None = None,
        start_timeout_s: float = _START_TIMEOUT_S,
        inherit: bool = True,
        folder: Path | None = None,
        log: BinaryIO | None = None,
        tied: bool = True,
    ) -> None:
        self._port = port
        self._has_accepted = False
        self._start_timeout_s = start_timeout_s
        log = log or tempfile.TemporaryFile()  # noqa: SIM115 (Process closes it)
        # The address must not wait in a buffer.
        env = {"PYTHONUNBUFFERED": "1", "MEDUSA_LOG_FORMAT": "text"} | dict(env or {})
        super().__init__(command, env, inherit=inherit, folder=folder, log=log, tied=tied)

    @property
    def port(self) -> int:
        """The server's port, once it has printed one. Raises MedusaError if the server ends or takes too long."""
        deadline = time.monotonic() + self._start_timeout_s
        while self._port is None:
            ended = not self.alive()
            for line in self.output().splitlines(keepends=True):
                if line.startswith(_LISTENING) and line.endswith("\n"):
                    self._port = int(line.rpartition(":")[2])
                    return self._port
            if ended:
                raise self.failure("ended before it was listening")
            self._pause(deadline, "printed no address")
        return self._port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self, timeout_s: float = _START_TIMEOUT_S) -> http.client.HTTPConnection:
        """Connect as soon as the port accepts. Raises MedusaError when the process ends before it ever did."""
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            ended = not self.alive()
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
            try:
                connection.connect()
                self._has_accepted = True
                return connection
            except ConnectionRefusedError:
                if self._has_accepted:
                    raise
                if ended:
                    raise self.failure("ended before it was listening") from None
                self._pause(deadline, f"accepts no connection on port {self.port}")

    def exchange(
        self,
        method: str,
        path: str,
        body: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float = 60.0,
    ) -> HttpResponse:
        """Send one request on a connection of its own. Raises OSError or HTTPException when the connection breaks."""
        with contextlib.closing(self.connect(timeout_s)) as connection:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            return HttpResponse(response.status, response.headers, response.read())

    def wait_ready(self, path: str = "/readyz", every_s: float = 0.01) -> None:
        """Ask ``path`` until it answers 200. Raises MedusaError with what the process printed when it ends before."""
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            with self.explained_failures():
                if self.exchange("GET", path).status == 200:
                    return
            self._pause(deadline, f"did not answer {path} with 200", every_s)

    def completion(self, body: Mapping[str, Any]) -> Completion:
        """Stream a completion, requested as soon as the port accepts. Raises MedusaError when it fails."""
        connection = self.connect()
        with self.explained_failures(), contextlib.closing(connection):
            return stream(connection, dict(body))

    def stages(self) -> tuple[Stage, ...]:
        """Return the stages of the server's start so far, as it reports them."""
        with self.explained_failures():
            answer = self.exchange("GET", "/timeline")
            return stages_from_json(answer.json) if answer.status == 200 else ()

    def metric(self, name: str) -> float | None:
        """Return a metric, summed over its labels; None if no metric has this name."""
        with self.explained_failures():
            lines = self.exchange("GET", "/metrics").text.splitlines()
        found = [float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(found) if found else None

    def own_error(self) -> MedusaError | None:
        """Return the error that `medusa serve` ended with, as its last line says it; None if it runs or said none."""
        words = self.output().rpartition("\nmedusa: ")[2].strip() if not self.alive() else ""
        text, bracket, code = words.removesuffix("]").rpartition(" [")
        return from_code(code, text) if bracket and words.endswith("]") else None

    def _pause(self, deadline: float, what: str, pause_s: float = _RETRY_S) -> None:
        if time.monotonic() > deadline:
            raise self.failure(f"{what} within {self._start_timeout_s:g} s")
        time.sleep(pause_s)


def serve_command(*arguments: str | Path, python: str = sys.executable) -> list[str | Path]:
    """Return the command that serves on a free port of this machine."""
    return [*medusa_command(python), "serve", "--host", "127.0.0.1", "--port", "0", *arguments]


def medusa_command(python: str = sys.executable) -> list[str]:
    """Return the command `medusa` of an interpreter."""
    installed = Path(python).with_name("medusa")
    return [str(installed)] if installed.exists() else [python, "-m", "medusa_adapters.cli.main"]


def stages_from_json(timeline: object) -> tuple[Stage, ...]:
    """Return the stages in an answer of /timeline."""
    entries = timeline.get("stages", []) if isinstance(timeline, dict) else []
    return tuple(
        Stage(e["name"], e["process"], int(e["start_ns"]), int(e["end_ns"]), e.get("detail") or {}) for e in entries
    )
