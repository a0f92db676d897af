"""Nodes on loopback: real agents, real servers of their regions, and an origin that counts what it sends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fork_server import MEDUSA_MAIN, ForkedProcess, ForkServer
from medusa_runtime.node.client import NodeClient
from medusa_runtime.region.reader import Region
from plain_environ import plain_environ
from process_tree import descendants
from waiting import until

from benchmarks.origin import Origin

ROOT = Path(__file__).parents[3]
MEDUSA = Path(sys.executable).with_name("medusa")


class Node:
    """An agent and the server of its regions, on an address of its own."""

    def __init__(
        self,
        folder: Path,
        host: str,
        token_file: Path,
        certificates: Sequence[Path] = (),
        wrapper: Sequence[str] = (),
        *,
        fork_server: ForkServer,
    ) -> None:
        self.wrapper = wrapper
        self.fork_server = fork_server
        self.folder = folder
        folder.mkdir()
        self.host = host
        self.token_file = token_file
        self.certificates = certificates
        self.socket, self.control = str(folder / "node.sock"), str(folder / "control.sock")
        self.log = folder / "log"
        self.port = 0
        self.clients: list[NodeClient] = []
        self.server = self.start_server()
        flags = ["--cluster", self.control, "--cluster-token", str(token_file)]
        for flag, path in zip(("--cluster-ca", "--cluster-cert", "--cluster-key"), certificates, strict=False):
            flags += [flag, str(path)]
        self._agent = ["node", "--socket", self.socket, "--memory-budget", "1GB", *flags]
        self.start_agent()

    def start_agent(self) -> None:
        """Start the agent, also again after it has ended."""
        before = self.output().count("node agent on")
        if self.wrapper:
            self.agent: Any = self._popen([MEDUSA, *self._agent])
        else:
            environ = plain_environ() | {"PYTHONUNBUFFERED": "1"}
            with open(self.log, "ab") as log:
                self.agent = self.fork_server.start(MEDUSA_MAIN, self._agent, folder=ROOT, environ=environ, log=log)
        until(lambda: self.output().count("node agent on") > before or self.agent.poll() is not None, self.output)

    @property
    def url(self) -> str:
        return f"http{'s' if self.certificates else ''}://{self.host}:{self.port}"

    def start_server(self) -> subprocess.Popen[bytes] | ForkedProcess:
        """Start the server, also again after it has ended; it keeps its port."""
        Path(self.control).unlink(missing_ok=True)
        files = map(str, (self.token_file, *self.certificates))
        arguments = [self.socket, self.control, f"{self.host}:{self.port}", *files]
        module = "benchmarks.cluster.peer_node"
        if self.wrapper:
            self.server = self._popen([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE)
        else:
            with open(self.log, "ab") as log:
                self.server = self.fork_server.start(
                    f"{module}:main", arguments, folder=ROOT, environ=plain_environ(), log=log, pipes=True
                )
        assert self.server.stdout
        self.port = int(self.server.stdout.readline() or pytest.fail(self.output()))
        return self.server

    def _popen(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                [*self.wrapper, *command],
                **{"stdout": log, "stderr": log, **options},
                cwd=ROOT,
                env=plain_environ() | {"PYTHONUNBUFFERED": "1"},
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def ask(self, op: str, **arguments: Any) -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.control)
            connection.sendall(json.dumps({"op": op, **arguments}).encode() + b"\n")
            return json.loads(connection.makefile().readline())["ok"]

    def read_from(self, *nodes: Node | str) -> None:
        """Have prefetchers of this node read from these nodes, best first."""
        self.ask("plan", sources=[node if isinstance(node, str) else node.url for node in nodes])

    def fetch(self, url: str) -> Region:
        """Have the agent fetch a model; returns its region once that is laid out."""
        self.clients.append(NodeClient(self.socket))
        return self.clients[-1].region(url)

    def held(self) -> dict[str, Any]:
        """Return the status of the agent's only region. If it is complete, wait until its prefetcher has ended."""
        client = NodeClient(self.socket)
        with contextlib.closing(client):
            regions = client.status()["regions"]
            if regions and regions[0]["state"] == "done":
                until(lambda: "prefetcher" not in descendants(self.agent.pid).values())
                regions = client.status()["regions"]
        return dict(regions[0]) if regions else {}

    def prefetcher(self) -> int:
        return next(pid for pid, name in descendants(self.agent.pid).items() if "prefetch" in name)

    def processes(self) -> list[int]:
        return [self.server.pid, self.agent.pid, *descendants(self.agent.pid)]

    def signal(self, number: int) -> None:
        """Send a signal to all of the node's processes."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        for client in self.clients:
            client.close()
        self.agent.terminate()
        self.server.kill()
        try:
            self.agent.wait(10)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
        self.server.wait()
        for pipe in (self.server.stdin, self.server.stdout):
            if pipe:
                pipe.close()


class Model:
    """A checkpoint on an origin, with the bytes that every node must have."""

    def __init__(self, origin: Origin, file: Path, data_start: int) -> None:
        self.origin = origin
        self.file = file
        self.url = f"{origin.url}/model"
        self.data = file.read_bytes()[data_start:]

    def replace(self) -> None:
        """Upload another version of the same size."""
        body = bytearray(self.file.read_bytes())
        body[-1] ^= 1
        self.file.write_bytes(body)
        self.data = self.data[:-1] + bytes(body[-1:])

    def check(self, region: Region) -> None:
        """Wait until a region is complete, and compare all of its bytes."""
        until(lambda: region.progress().state in ("done", "failed"))
        progress = region.progress()
        assert progress.state == "done", progress.error
        assert bytes(region.shard(0)) == self.data

    def copies(self) -> float:
        """Return what the origin has sent, in copies of the model."""
        return self.origin.sent_bytes() / len(self.data)


def percent(region: Region) -> float:
    progress = region.progress()
    return 100 * progress.fetched_bytes / max(progress.total_bytes, 1)
