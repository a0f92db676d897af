"""Real `medusa serve` and `medusa cluster gateway` processes, for the tests of gateways."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fork_server import MEDUSA_MAIN, ForkServer
from forked_instance import ForkedInstance
from medusa_adapters.bench.served_instance import serve_command
from plain_environ import plain_environ
from process_tree import descendants
from waiting import until

MEDUSA = Path(sys.executable).with_name("medusa")
MODEL = Path(__file__).parents[3] / "examples" / "pydoc-lm"
PATIENCE_S = 60.0
NAME = "tiny"


class Instance(ForkedInstance):
    """A `medusa serve` process."""

    def __init__(self, *arguments: str, model: Path = MODEL, fork_server: ForkServer | None = None) -> None:
        environment = plain_environ() | {"OMP_NUM_THREADS": "1"}
        command = serve_command("--model", model, "--served-model-name", NAME, "--node-socket", "none", *arguments)
        super().__init__(command, environment, fork_server=fork_server)

    def signal(self, number: int) -> None:
        """Send a signal to all its processes."""
        for pid in self.tree():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def signal_role(self, role: str, number: int) -> None:
        """Send a signal to its process of this role."""
        pid = next(pid for pid, name in descendants(self.process.pid).items() if name == role)
        os.kill(pid, number)


class GatewayProcess:
    """One `medusa cluster gateway`."""

    def __init__(
        self,
        folder: Path,
        address: str,
        token_file: Path,
        *arguments: str,
        ready: bool = True,
        wrapper: Sequence[str] = (),
        fork_server: ForkServer | None = None,
    ) -> None:
        self.log = folder / f"gateway-{time.monotonic_ns()}.log"
        environment = plain_environ()
        words = ["cluster", "gateway", "--host", "127.0.0.1", "--port", "0", "--address", address]
        words += ["--token-file", str(token_file), *arguments]
        with open(self.log, "wb") as log:
            if fork_server is not None and not wrapper:
                self.process: Any = fork_server.start(MEDUSA_MAIN, words, environ=environment, log=log)
            else:
                self.process = subprocess.Popen(
                    [*wrapper, MEDUSA, *words],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment | {"PYTHONUNBUFFERED": "1"},
                )
        until(lambda: "listening on" in self.output() or self.process.poll() is not None, self.output)
        assert self.process.poll() is None, self.output()
        line = next(line for line in self.output().splitlines() if line.startswith("listening on "))
        self.port = int(line.rpartition(":")[2])
        self.url = f"http://127.0.0.1:{self.port}"
        if ready:
            until(lambda: self.get("/readyz")[0] == 200, self.output)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def get(self, path: str) -> tuple[int, Any]:
        status, _, body = self.exchange("GET", path)
        return status, body

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        status, _, answer = self.exchange("POST", path, body)
        return status, answer

    def exchange(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        with contextlib.closing(self.connection()) as connection:
            data = body if isinstance(body, bytes | None) else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"} | (headers or {}))
            response = connection.getresponse()
            raw = response.read()
            kind = response.headers.get("Content-Type", "")
            found = {name.lower(): value for name, value in response.headers.items()}
            return response.status, found, json.loads(raw) if "json" in kind else raw.decode()

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def metric(self, name: str, **labels: str) -> float:
        """A metric, summed over what has these labels."""
        lines = self.get("/metrics")[1].splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = [
            line for line in lines if line.startswith((f"{name}{{", f"{name} ")) and all(w in line for w in wanted)
        ]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Stream:
    """A streamed answer of a gateway, read event by event."""

    def __init__(self, gateway: GatewayProcess, path: str, body: dict[str, Any]) -> None:
        self._connection = gateway.connection()
        self._connection.request(
            "POST", path, json.dumps({"model": NAME, "stream": True} | body), {"Content-Type": "application/json"}
        )
        self._response = self._connection.getresponse()
        assert self._response.status == 200, self._response.read()
        self.chunks: list[dict[str, Any]] = []
        self.error: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self._response:
            if line.startswith(b"data: [DONE]"):
                self._response.read()  # the end of the answer; who closes before it counts as one that left
                self._connection.close()
                return
            if line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    self.error = chunk["error"]
                else:
                    self.chunks.append(chunk)
                    yield chunk
        pytest.fail("the stream ended without [DONE]")

    def take(self, count: int) -> None:
        for _, _ in zip(range(count), self, strict=False):
            pass

    def rest(self) -> None:
        for _ in self:
            pass

    def texts(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                text = choice.get("text", choice.get("delta", {}).get("content") or "")
                found[choice["index"]] = found.get(choice["index"], "") + text
        return found


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


def peak_mb(pid: int) -> float:
    found = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(found.split()[1]) / 1e3
