"""Real `medusa serve` processes behind each platform's environment."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FUNCTIONS = Path(__file__).parents[1] / "functions"
EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc-lm"
MEDUSA = Path(sys.executable).with_name("medusa")
_OURS = ("MEDUSA_", "K_", "SAGEMAKER_", "OPENFAAS_", "PORT")


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Instance:
    """One `medusa serve` process in its own folder; header names of answers are lower case."""

    def __init__(self, folder: Path, env: dict[str, str], *arguments: str) -> None:
        self.folder = folder
        self.log = folder / "log"
        plain = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        (folder / "tmp").mkdir()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [MEDUSA, "serve", "--host", "127.0.0.1", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=plain | {"TMPDIR": str(folder / "tmp"), "PORT": "0", "PYTHONUNBUFFERED": "1"} | env,
            )
        self.port = self._port()

    def _port(self) -> int:
        for _ in range(3000):
            for line in self.output().splitlines():
                if line.startswith("listening on "):
                    return int(line.rpartition(":")[2])
            if self.process.poll() is not None:
                pytest.fail(f"medusa serve ended:\n{self.output()}")
            time.sleep(0.01)
        pytest.fail(f"medusa serve printed no address:\n{self.output()}")

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def connect(self, timeout_s: float = 60.0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def request(self, method: str, path: str, body: bytes | dict[str, Any] | None = None, **headers: str) -> Answer:
        """Header names are written with ``_`` for ``-``."""
        sent = json.dumps(body).encode() if isinstance(body, dict) else body
        if isinstance(body, dict):
            headers.setdefault("content_type", "application/json")
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, sent, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            data = response.read()
            return Answer(response.status, data, {name.lower(): value for name, value in response.getheaders()})

    def raw(self, text: bytes) -> bytes:
        """What comes back for these bytes, up to the end of the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(text)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := connection.recv(65536):
                    answer += piece
            return answer

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(3000):
            if condition():
                return
            assert self.process.poll() is None, self.output()
            time.sleep(0.02)
        pytest.fail(f"it did not become true:\n{self.output()}")

    def wait_ready(self) -> Instance:
        self.until(lambda: self.request("GET", "/readyz").status == 200)
        return self

    def metric(self, name: str) -> float:
        lines = self.request("GET", "/metrics").body.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + " ", name + "{")))

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def _instances() -> Iterator[Callable[..., Instance]]:
    started: list[Instance] = []

    def launch(*arguments: str, handler: str = "", wait: bool = True, **env: str) -> Instance:
        """``handler`` lies in tests/functions; keyword arguments are the environment."""
        extra = ("--handler", str(FUNCTIONS / handler)) if handler else ()
        # A short path: the engine's Unix socket lies under it, and such paths end at 107 bytes.
        started.append(Instance(Path(tempfile.mkdtemp(prefix="m")), env, *extra, *arguments))
        return started[-1].wait_ready() if wait else started[-1]

    yield launch
    for instance in started:
        if instance.process.poll() is None:
            instance.process.kill()
        instance.process.wait(10)
        subprocess.run(["rm", "-rf", instance.folder], check=True)


@pytest.fixture
def launch() -> Iterator[Callable[..., Instance]]:
    with _instances() as launch:
        yield launch


@pytest.fixture(scope="module")
def launch_module() -> Iterator[Callable[..., Instance]]:
    """Instances that all tests of a file share."""
    with _instances() as launch:
        yield launch
