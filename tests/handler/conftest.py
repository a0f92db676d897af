"""The real gunicorn server in a process of its own, with a small in-process engine behind it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer

FUNCTIONS = Path(__file__).parents[1] / "functions"


class Served:
    """One server process. ``control`` drives its engine: one JSON line each, e.g. {"ready": true}."""

    def __init__(self, server: ForkServer, folder: Path, options: dict[str, Any]) -> None:
        self.log = folder / "log"
        with open(self.log, "wb") as log:
            self.process = server.start(
                "handler.serve_scripted:main", [json.dumps(options)], folder=folder, log=log, pipes=True
            )
        assert self.process.stdin
        assert self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

        line = self.stdout.readline()
        if not line:
            self.process.wait(120)
            pytest.fail(f"the server did not start:\n{self.output()}")
        self.port = int(line)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def control(self, **command: Any) -> None:
        """Returns when it holds for every request from here on."""
        self.stdin.write(json.dumps(command).encode() + b"\n")
        assert self.stdout.readline() == b"done\n", self.output()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=240)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, body (parsed when it is JSON) and headers (lower case)."""
        sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, sent, {"Content-Type": "application/json"} | (headers or {}))
            response = connection.getresponse()
            data = response.read()
            found = {name.lower(): value for name, value in response.getheaders()}
        return response.status, json.loads(data) if "json" in found.get("content-type", "") else data, found

    def complete(self, **body: Any) -> tuple[int, Any, dict[str, str]]:
        return self.request("POST", "/v1/completions", {"prompt": "a b c", "max_tokens": 5} | body)

    def prompts(self) -> list[str]:
        """Return what the engine has been asked since the last call."""
        path = self.log.parent / "prompts"
        asked: list[str] = path.read_text().splitlines()
        os.truncate(path, 0)
        return asked

    def metric(self, name: str) -> float:
        lines = self.request("GET", "/metrics")[1].decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + " ", name + "{")))

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(3000):
            if condition():
                return
            assert self.process.poll() is None, self.output()
            time.sleep(0.02)
        pytest.fail(f"it did not become true within 60 s:\n{self.output()}")

    def wait_ready(self) -> None:
        self.until(lambda: self.request("GET", "/readyz")[0] == 200)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def servers(server: ForkServer, folder: Path) -> Iterator[Callable[..., Served]]:
    """Start servers; options are Settings fields, ``engine`` (true), ``ready`` (true), ``files`` of the checkpoint,
    and ``http_port`` of an HTTP server that the engine has of its own.

    ``handler`` is relative to tests/functions.
    """
    started: list[Served] = []

    def start(**options: Any) -> Served:
        if "handler" in options:
            options = {"engine": False} | options | {"handler": str(FUNCTIONS / options["handler"])}
        own = folder / str(len(started))
        own.mkdir()
        started.append(Served(server, own, options))
        return started[-1]

    yield start
    for served in started:
        if served.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(served.process.pid, signal.SIGKILL)
        served.process.wait(120)
        for pipe in (served.stdin, served.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


@pytest.fixture
def serve(fork_server: ForkServer, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Servers of one test."""
    with servers(fork_server, tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def serve_module(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """Servers that all tests of a file share."""
    with servers(fork_server, tmp_path_factory.mktemp("servers")) as start:
        yield start
