"""`medusa serve` behind each platform's environment, forked from a process that has imported it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from forked_instance import ForkedInstance
from medusa_adapters.bench.served_instance import HttpResponse

FUNCTIONS = Path(__file__).parents[1] / "functions"
EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc-lm"
_OURS = ("MEDUSA_", "K_", "SAGEMAKER_", "OPENFAAS_", "PORT")


class Instance(ForkedInstance):
    """One `medusa serve` process in its own folder, on the port that its platform's variables name."""

    def __init__(self, server: ForkServer, folder: Path, env: dict[str, str], *arguments: str) -> None:
        self.folder = folder
        plain = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        (folder / "tmp").mkdir()
        environment = plain | {"TMPDIR": str(folder / "tmp"), "PORT": "0"} | env
        command = ["medusa", "serve", "--host", "127.0.0.1", *arguments]
        log = open(folder / "log", "w+b")  # noqa: SIM115 (closed with the instance)
        super().__init__(command, environment, fork_server=server, folder=folder, log=log)

    def request(
        self, method: str, path: str, body: bytes | dict[str, Any] | None = None, **headers: str
    ) -> HttpResponse:
        """Header names are written with ``_`` for ``-``."""
        sent = json.dumps(body).encode() if isinstance(body, dict) else body
        if isinstance(body, dict):
            headers.setdefault("content_type", "application/json")
        return self.exchange(method, path, sent, {name.replace("_", "-"): value for name, value in headers.items()})

    def raw(self, text: bytes) -> bytes:
        """Return what comes back for these bytes, up to the end of the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=240) as connection:
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

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def _instances(server: ForkServer) -> Iterator[Callable[..., Instance]]:
    started: list[Instance] = []

    def launch(*arguments: str, handler: str = "", wait: bool = True, **env: str) -> Instance:
        """``handler`` lies in tests/functions; keyword arguments are the environment."""
        extra = ("--handler", str(FUNCTIONS / handler)) if handler else ()
        # A short path: the engine's Unix socket lies under it, and such paths end at 107 bytes.
        started.append(Instance(server, Path(tempfile.mkdtemp(prefix="m")), env, *extra, *arguments))
        if wait:
            started[-1].wait_ready()
        else:
            assert started[-1].port
        return started[-1]

    yield launch
    for instance in started:
        instance.close()
        subprocess.run(["rm", "-rf", instance.folder], check=True)


@pytest.fixture
def launch(fork_server: ForkServer) -> Iterator[Callable[..., Instance]]:
    with _instances(fork_server) as launch:
        yield launch


@pytest.fixture(scope="module")
def launch_module(fork_server: ForkServer) -> Iterator[Callable[..., Instance]]:
    """Instances that all tests of a file share."""
    with _instances(fork_server) as launch:
        yield launch
