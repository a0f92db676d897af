"""Nodes of a laboratory that only fetch and pass on weights. Each has a node agent and a server of its regions."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from medusa_cluster.lab.laboratory import SWITCH, Laboratory
from medusa_cluster.node.certificates import write_certificates
from medusa_cluster.node.settings import TlsFiles
from medusa_runtime.errors import LabError, from_code

_PORT = 8114
_READY_WITHIN_S = 60.0
_ANSWER_WITHIN_S = 300.0


class ControlConnection:
    """A connection to a node's control socket, as a context manager. Wait for each answer before the next order."""

    def __init__(self, name: str, connection: socket.socket) -> None:
        self._name = name
        self._socket = connection
        self._answers = connection.makefile()

    def send(self, op: str, **arguments: Any) -> None:
        self._socket.sendall(json.dumps({"op": op, **arguments}).encode() + b"\n")

    def answer(self) -> Any:
        """Wait for the answer, and return it. If the answer is an error, raise it."""
        answer = json.loads(self._answers.readline())
        if "error" in answer:
            raise from_code(answer["error"]["code"], f"{self._name}: {answer['error']['message']}")
        return answer["ok"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.close()
        self._socket.close()


class WeightNode:
    """A node that fetches and passes on weights. Other nodes reach its server at ``url``."""

    def __init__(self, lab: Laboratory, name: str, token_file: str, *, tls: bool = False) -> None:
        folder = lab.node_folder(name)
        self.name = name
        self.url = f"{'https' if tls else 'http'}://{lab.address(name)}:{_PORT}"
        self._lab = lab
        self._control, agent = str(folder / "control.sock"), str(folder / "node.sock")
        self._log = folder / "log"
        cluster = ["--cluster", self._control, "--cluster-token", token_file]
        files: dict[str, str] = {}
        if tls:
            made = TlsFiles.below(folder)
            write_certificates(Path(token_file).read_text(), made, lab.address(name))
            files = {"ca": str(made.authority), "cert": str(made.certificate), "key": str(made.key)}
            cluster += [word for name, path in files.items() for word in (f"--cluster-{name}", path)]
        self._start(["-m", "medusa_adapters", "node", "--socket", agent, *cluster])
        listen = f"{lab.address(name)}:{_PORT}"
        self._start(["-m", "benchmarks.cluster.peer_node", agent, self._control, listen, token_file, *files.values()])

    def _start(self, command: Sequence[str]) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MEDUSA_")}
        with open(self._log, "ab") as log:
            self._lab.popen(
                self.name, [sys.executable, *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + _READY_WITHIN_S
        while True:
            try:
                if "node agent on" in self._log.read_text():
                    self.ask("sources")
                    return
            except OSError:
                pass
            if time.monotonic() > deadline:
                raise LabError(f"{self.name} did not start: {self._log.read_text()[-500:]}")
            time.sleep(0.1)

    def ask(self, op: str, **arguments: Any) -> Any:
        """Send an order to the node's control socket, and return the answer. If the answer is an error, raise it."""
        with self.connect() as connection:
            connection.send(op, **arguments)
            return connection.answer()

    def connect(self) -> ControlConnection:
        """Connect to the node's control socket."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_ANSWER_WITHIN_S)
        try:
            connection.connect(self._control)
        except OSError:
            connection.close()
            raise
        return ControlConnection(self.name, connection)


@contextmanager
def weight_nodes(lab: Laboratory, *, tls: bool = False) -> Iterator[list[WeightNode]]:
    """Start the processes of all nodes, which end with the laboratory. ``tls``: what they send is encrypted."""
    token_file = lab.node_folder(SWITCH) / "weights-token"
    token_file.touch(0o600)
    token_file.write_text(secrets.token_hex(32))
    with ExitStack():
        nodes = [WeightNode(lab, name, str(token_file), tls=tls) for name in lab.nodes]
        for node in nodes:
            node.wait_ready()
        yield nodes
