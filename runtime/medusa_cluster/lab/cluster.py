"""A cluster on a laboratory's nodes: node servers and gateways, started by their commands."""

from __future__ import annotations

import http
import http.client
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_runtime.errors import LabError, UnauthorizedError, from_code

from ..node.gpus import gpu_environment, visible_gpus
from .laboratory import SWITCH, Laboratory

DATA_PORT = 8114
_START_S = 180.0
_END_S = 45.0
_POLL_S = 0.2
_SHOWN_LINES = 5


class LabCluster:
    """A cluster whose head is the laboratory's first node. Node servers end with the laboratory, or with ``stop``.

    ``flags`` are further flags of ``medusa cluster start``, for all nodes. ``gpus`` are the names of this machine's
    GPUs, which are divided among the nodes: each lends its own to one instance at a time. None: all that are visible.
    """

    def __init__(
        self,
        lab: Laboratory,
        flags: Sequence[str] = (),
        gpus: Sequence[str] | None = None,
    ) -> None:
        self.lab = lab
        names = visible_gpus(os.environ) if gpus is None else gpus
        count = len(lab.nodes)
        self.gpus_of = {node: tuple(names[number::count]) for number, node in enumerate(lab.nodes)} if names else {}
        self.head = lab.nodes[0]
        self.servers: dict[str, subprocess.Popen[bytes]] = {}
        self.gateways: list[subprocess.Popen[bytes]] = []
        self.token_file = lab.node_folder(SWITCH) / "token"
        self._flags = tuple(flags)
        self._began: dict[str, int] = {}  # node → the offset in its log where the running server's output begins
        self.token = secrets.token_hex(32)
        self.token_file.touch(0o600)
        self.token_file.write_text(self.token)

    def start(self) -> None:
        """Start all nodes. Returns once each of them can reach the controller."""
        self.start_head()
        self.start_others()

    def start_head(self) -> None:
        """Start the head. Returns once it has a controller, so that gateways and nodes can join."""
        self.start_node(self.head)
        self.wait_ready(self.head)

    def start_others(self, on_ready: Callable[[str], None] = lambda node: None) -> None:
        """Start all nodes but the head. ``on_ready`` is called with each node that can reach the controller."""
        # A few at a time, so that the first ones are there soon. A start takes a core some seconds.
        others, at_once = self.lab.nodes[1:], 2 * len(os.sched_getaffinity(0))
        for first in range(0, len(others), at_once):
            group = others[first : first + at_once]
            for node in group:
                self.start_node(node)
            for node in group:
                self.wait_ready(node)
                on_ready(node)

    def start_node(self, node: str) -> None:
        """Start a node's server, perhaps again after it has ended."""
        role = ["--head"] if node == self.head else ["--address", self.lab.address(self.head)]
        command = ["start", *role, "--name", node, "--host", self.lab.address(node)]
        command += ["--dir", str(self.lab.node_folder(node)), "--token-file", str(self.token_file)]
        if self.lab.link:
            command += ["--link-bytes-per-s", f"{self.lab.link.bytes_per_s:.0f}"]
        log = self.log(node)
        self._began[node] = log.stat().st_size if log.exists() else 0
        self.servers[node] = self._medusa(node, [*command, *self._flags], log, self._gpu_environment(node))

    def _gpu_environment(self, node: str) -> dict[str, str]:
        """Return the variables that show a node its GPUs, and no others."""
        if not self.gpus_of:
            return {}
        return gpu_environment(self.gpus_of[node]) | {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus_of[node])}

    def describe_gpus(self) -> str | None:
        """Return a line that says which node has which of this machine's GPUs, or None if it has no GPU."""
        if not self.gpus_of:
            return None
        having = [f"{node} has {', '.join(names)}" for node, names in self.gpus_of.items() if names]
        without = [node for node, names in self.gpus_of.items() if not names]
        rest = [f"none is left for {', '.join(without)}"] if without else []
        return f"GPUs of this machine: {'; '.join(having + rest)}"

    def wait_ready(self, node: str) -> None:
        server = self.servers[node]
        log, began = self.log(node), self._began[node]
        self._until(lambda: b"\nready\n" in log.read_bytes()[began:], server, log)

    def stop(self) -> None:
        """End gateways and nodes with SIGTERM, the head last. Those that do not end in time are killed."""
        others = [server for node, server in self.servers.items() if node != self.head]
        deadline = time.monotonic() + _END_S
        for group in (self.gateways, others, list(self.servers.values())):
            for process in group:
                process.terminate()
            for process in group:
                try:
                    process.wait(max(deadline - time.monotonic(), 0.1))
                except subprocess.TimeoutExpired:
                    process.kill()

    def start_gateway(self, port: int, *flags: str) -> str:
        """Start a gateway on the switch, where no link limits it, and return its URL for the nodes."""
        log = self.lab.node_folder(SWITCH) / f"gateway-{port}.log"
        command = ["gateway", "--host", self.lab.address(SWITCH), "--port", str(port)]
        command += ["--address", self.lab.address(self.head), "--token-file", str(self.token_file), *flags]
        process = self._medusa(SWITCH, command, log)
        self.gateways.append(process)
        self._until(lambda: self._answers(port), process, log)
        return f"http://{self.lab.address(SWITCH)}:{port}"

    def call(self, operation: str, *, node: str | None = None, timeout_s: float = 60.0, **arguments: Any) -> Any:
        """Call the controller through a node's server, by default the head's. Raises the error in the answer."""
        address = self.lab.address(node or self.head)
        connection = http.client.HTTPConnection(address, DATA_PORT, timeout=timeout_s)
        try:
            with self.lab.network(SWITCH):
                connection.connect()
            headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
            connection.request("POST", f"/cluster/{operation}", json.dumps(arguments), headers)
            response = connection.getresponse()
            if response.status == http.HTTPStatus.UNAUTHORIZED:
                raise UnauthorizedError(f"{address} refused the token")
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise LabError(f"{operation} through {address} failed: {error}") from error
        finally:
            connection.close()
        if "error" in answer:
            raise from_code(answer["error"]["code"], answer["error"]["message"])
        return answer["ok"]

    def deploy(self, name: str, **options: Any) -> Any:
        """Deploy the model that the laboratory's origin serves under this name."""
        return self.call("deploy", name=name, url=f"{self.lab.origin_url}/{name}", **options)

    def status(self) -> Any:
        return self.call("status")

    def log(self, node: str) -> Path:
        """Return the file with a node server's output. The logs of its processes are in the node's folder."""
        return self.lab.node_folder(SWITCH) / f"{node}.log"

    def _medusa(
        self, node: str, command: Sequence[str], log: Path, more: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MEDUSA_", "RAY_"))}
        with open(log, "ab") as output:
            return self.lab.popen(
                node,
                [sys.executable, "-m", "medusa_adapters", "cluster", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment | dict(more or {}) | {"PYTHONUNBUFFERED": "1"},
            )

    def _answers(self, port: int) -> bool:
        connection = http.client.HTTPConnection(self.lab.address(SWITCH), port, timeout=2)
        try:
            with self.lab.network(SWITCH):
                connection.connect()
            return True
        except OSError:
            return False
        finally:
            connection.close()

    def _until(self, condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
        deadline = time.monotonic() + _START_S
        while not condition():
            if process.poll() is not None or time.monotonic() > deadline:
                ended = f"ended with {process.returncode}" if process.poll() is not None else "is not up yet"
                output = " | ".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
                raise LabError(f"{log.stem} {ended}: {output or 'it printed nothing'}")
            time.sleep(_POLL_S)
