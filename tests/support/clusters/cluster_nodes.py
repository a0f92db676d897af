"""Real `medusa cluster start` processes on loopback addresses, for the tests of nodes and of the controller."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_runtime.errors import from_code
from medusa_runtime.process import die_with_parent
from process_tree import alive, descendants
from waiting import until

MEDUSA = Path(sys.executable).with_name("medusa")
MODEL = Path(__file__).parents[3] / "examples" / "pydoc-lm"
PATIENCE_S = 240.0
_PORTS = 50  # for each node: its own, and Ray's


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEDUSA_", "RAY_"))}
    return kept | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


class ClusterNode:
    """A node server with everything that it starts. The head is on 127.0.0.2, the others on the addresses after it."""

    def __init__(
        self,
        name: str,
        number: int,
        head: ClusterNode | None = None,
        *,
        token: str | None = None,
        flags: Sequence[str] = (),
        wrapper: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """``token``: another than the head's. ``wrapper``: a command that becomes the node server's."""
        self.flags = flags
        self.environ = environ or {}
        self.wrapper = wrapper
        self.name = name
        self.head = head
        self.host = f"127.0.0.{number + 2}"
        # Of processes that test at the same time, each takes other ports.
        self.port = 20000 + os.getpid() % 120 * 4 * _PORTS + number * _PORTS if head is None else head.port
        self.ray_port = self.port + 1 + number * _PORTS if head is None else head.ray_port + number * _PORTS
        self.folder = Path(tempfile.mkdtemp(prefix="c"))
        self.log = self.folder / "out"
        self.token_file = (head or self).folder / "token"
        if token is not None:
            self.token_file = self.folder / "token"
            self.token_file.touch(0o600)
            self.token_file.write_text(token)
        self.start()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def command(self) -> list[str]:
        role = ["--head"] if self.head is None else ["--address", self.head.address]
        where = ["--name", self.name, "--host", self.host, "--data-port", str(self.port), "--dir", str(self.folder)]
        more = ["--ray-port", str(self.ray_port), "--token-file", str(self.token_file), "--memory-budget", "500MB"]
        return [*self.wrapper, str(MEDUSA), "cluster", "start", *role, *where, *more, *self.flags]

    def start(self) -> None:
        """Start the node server, also again after its end. It ends with this test's process."""
        parent = os.getpid()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                self.command(),
                env=environment() | self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: die_with_parent(parent),
            )

    def wait_ready(self) -> ClusterNode:
        until(lambda: "\nready\n" in self.output() or self.process.poll() is not None, self.output)
        assert self.process.poll() is None, self.output()
        return self

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def medusa(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of the commands that ask the cluster, through this node's control socket."""
        command = [str(MEDUSA), "cluster", *arguments, "--dir", str(self.folder)]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S)

    def call(self, operation: str, **arguments: Any) -> Any:
        """Call the controller through this node server, over HTTP. Raises the error that it answers."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=240)
        try:
            connection.request("POST", f"/cluster/{operation}", json.dumps(arguments), self.headers())
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        if "error" in answer:
            raise from_code(answer["error"]["code"], answer["error"]["message"])
        return answer["ok"]

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token_file.read_text()}", "Content-Type": "application/json"}

    def status_of(self, name: str) -> dict[str, Any]:
        """Return what the controller says of a node; empty if it does not know it."""
        return next((node for node in self.call("status")["nodes"] if node["name"] == name), {})

    def ready_instance(self, model: str) -> dict[str, Any] | None:
        instances = self.call("routes")["models"][model]["instances"]
        return next((item for item in instances if item["state"] == "ready"), None)

    def processes(self) -> dict[int, str]:
        return descendants(self.process.pid)

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to the process of this name; its pid."""
        pid = next(pid for pid, found in self.processes().items() if found.startswith(name))
        os.kill(pid, number)
        return pid

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal to the node server; its exit status. Nothing of it is left."""
        processes = self.processes()
        self.process.send_signal(number)
        status = self.process.wait(60)
        until(lambda: not any(map(alive, processes)), lambda: str(list(filter(alive, processes))))
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            processes = self.processes()
            self.process.kill()
            self.process.wait()
            for pid in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            until(lambda: not any(map(alive, processes)), lambda: str(list(filter(alive, processes))))
        shutil.rmtree(self.folder, ignore_errors=True)


def complete(url: str, headers: dict[str, str], **fields: Any) -> Any:
    """Send a completion to an instance at its node server and return the answer."""
    host, path = url.removeprefix("http://").split("/", 1)
    connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
    body = {"prompt": "This function returns", "max_tokens": 8, "temperature": 0} | fields
    try:
        connection.request("POST", f"/{path}/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        return json.loads(response.read())
    finally:
        connection.close()
