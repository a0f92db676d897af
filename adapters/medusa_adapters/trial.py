"""A served function in a process of its own, for a project's tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

_LOOK_S = 0.02
_STOP_S = 40
_LISTENING = "listening on "
_DONE = "[DONE]"


class TrialError(AssertionError):
    """The function did not come up, or a stream was cut; the message ends with what the server printed."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Trial:
    """``with Trial("--handler", "handler.py") as function:`` runs `medusa serve` with these arguments, until ready.

    On a free port of 127.0.0.1; stopped as a platform does it, by SIGTERM.
    """

    def __init__(self, *arguments: str, timeout_s: float = 120.0) -> None:
        self._arguments = arguments
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""  # http://127.0.0.1:…, while it runs

    def __enter__(self) -> Self:
        # A file, not a pipe: nobody needs to read it for the server to go on.
        self._output = tempfile.TemporaryFile()
        command = [sys.executable, "-m", "medusa_adapters.cli.main", "serve", "--host", "127.0.0.1", "--port", "0"]
        environ = os.environ | {"PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [*command, *self._arguments], stdout=self._output, stderr=subprocess.STDOUT, env=environ
        )
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        self._output.close()

    def post(self, path: str, body: str | bytes, headers: Mapping[str, str] | None = None) -> Answer:
        """One POST; a status of 400 or more is an answer like any other."""
        return self._request("POST", path, body.encode() if isinstance(body, str) else body, headers)

    def get(self, path: str) -> Answer:
        return self._request("GET", path, None, None)

    def events(self, path: str, body: str | bytes, headers: Mapping[str, str] | None = None) -> list[str]:
        """The data of a stream's events, without the ``[DONE]`` at the end. TrialError when that is missing."""
        answer = self.post(path, body, headers)
        events = [
            "\n".join(line[len("data: ") :] for line in block.splitlines() if line.startswith("data: "))
            for block in answer.text.split("\n\n")
            if "data: " in block
        ]
        if answer.status != 200 or events[-1:] != [_DONE]:
            raise TrialError(f"expected a stream that ends with {_DONE}, found status {answer.status}: {answer.text}")
        return events[:-1]

    def _request(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None) -> Answer:
        given = {"Content-Type": "application/json"} | {key.title(): text for key, text in (headers or {}).items()}
        request = urllib.request.Request(self.url + path, body, given, method=method)
        try:
            response = urllib.request.urlopen(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            return Answer(response.status, response.headers, response.read().decode())

    def _wait_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise TrialError(f"`medusa serve` ended with status {self._process.returncode}:\n{self._printed()}")
            if not self.url:
                self.url = self._address()
            elif self._ready():
                return
            time.sleep(_LOOK_S)
        raise TrialError(f"the function was not ready within {self._timeout_s:g} s:\n{self._printed()}")

    def _ready(self) -> bool:
        try:
            return self.get("/readyz").status == 200
        except OSError:  # it is about to end; the loop tells why
            return False

    def _address(self) -> str:
        lines = [line for line in self._printed().splitlines() if line.startswith(_LISTENING)]
        return lines[0].removeprefix(_LISTENING).strip() if lines else ""

    def _printed(self) -> str:
        # Positioned reads: the file's position is the server's.
        return os.pread(self._output.fileno(), 1_000_000, 0).decode(errors="replace")
