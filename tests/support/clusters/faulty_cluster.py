"""A cluster of real nodes under traffic, whose parts tests kill, stop and cut off."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from medusa_cluster.lab.cluster import LabCluster
from medusa_cluster.lab.laboratory import Laboratory
from medusa_runtime.errors import MedusaError
from process_tree import process_name

PATIENCE_S = 150.0
NAMES = [f"m{number}" for number in range(12)]  # models of test_weight_faults.py
LARGE = "large"  # one that no node has room for
BUDGET_MB = 300  # of each node
PROMPT = {"prompt": "This function returns", "max_tokens": 24, "temperature": 0}


def until(condition: Callable[[], Any], told: Callable[[], object] = lambda: "", patience_s: float = PATIENCE_S) -> Any:
    """Wait for a condition, and return what it returned. Calls that fail meanwhile count as no."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            found = condition()
        except MedusaError as error:
            found, last = None, str(error)
        else:
            last = ""
        if found:
            return found
        if time.monotonic() > deadline:
            pytest.fail(f"it did not come to pass within {patience_s:g} s: {last} {told()}")
        time.sleep(0.3)


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    seconds: float


class Traffic:
    """Clients that send the same request again and again, each a connection at a time; a context manager."""

    def __init__(self, url: str, model: str, clients: int = 2) -> None:
        self._place = urlsplit(url)
        self._body = json.dumps(PROMPT | {"model": model})
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]
        self.answers: list[Answer] = []

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, count: int) -> None:
        """Until so many more answers have come."""
        before = len(self.answers)
        until(lambda: len(self.answers) >= before + count, lambda: self.answers[-3:])

    def check(self) -> None:
        """No request was lost, and all answers are the same."""
        assert self.answers
        assert [answer for answer in self.answers if answer.status != 200] == []
        assert len({answer.text for answer in self.answers}) == 1

    def _run(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            try:
                status, text = self.ask()
            except (OSError, http.client.HTTPException) as error:
                status, text = 0, repr(error)
            self.answers.append(Answer(status, text, time.monotonic() - began))
            self._ended.wait(0.2)

    def ask(self) -> tuple[int, str]:
        assert self._place.hostname
        connection = http.client.HTTPConnection(self._place.hostname, self._place.port, timeout=PATIENCE_S)
        try:
            connection.request("POST", "/v1/completions", self._body, {"content-type": "application/json"})
            response = connection.getresponse()
            body = response.read().decode()
            return response.status, json.loads(body)["choices"][0]["text"] if response.status == 200 else body
        finally:
            connection.close()


class FaultyCluster(LabCluster):
    """A cluster with eyes for its processes and its state."""

    def node(self, name: str) -> dict[str, Any]:
        """Return what the status says of a node; a controller that has just begun does not know it yet."""
        unknown = {"name": name, "state": "unknown", "models": [], "instances": []}
        return next((node for node in self.status()["nodes"] if node["name"] == name), unknown)

    def model(self, name: str) -> dict[str, Any]:
        return next(model for model in self.status()["models"] if model["name"] == name)

    def copy(self, node: str, url: str) -> dict[str, Any] | None:
        """Return what the status says of a model on a node."""
        return next((model for model in self.node(node)["models"] if model["url"] == url), None)

    def instances(self, state: str = "ready") -> list[str]:
        """The nodes that have a ready instance."""
        return [node["name"] for node in self.status()["nodes"] for item in node["instances"] if item["state"] == state]

    def wait_nodes(self, state: str = "alive", *names: str) -> None:
        wanted = names or self.lab.nodes
        until(lambda: all(self.node(name)["state"] == state for name in wanted), self.describe)

    def pids(self, node: str, words: str) -> list[int]:
        """The processes of a node whose command line or name has these words."""
        return [pid for pid, line in self.lab.processes(node).items() if words in line or process_name(pid) == words]

    def _medusa(
        self, node: str, command: Sequence[str], log: Path, more: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        # The tests look at regions from outside of the nodes, which counts as another container.
        allow = {"MEDUSA_NODE_ALLOW": f"{self.lab.origin_url}/={os.getuid()}"}
        return super()._medusa(node, command, log, dict(more or {}) | allow)

    def signal(self, node: str, words: str, number: signal.Signals) -> list[int]:
        """Send a signal to these processes; there must be some."""
        found = self.pids(node, words)
        assert found, self.lab.processes(node)
        for pid in found:
            os.kill(pid, number)
        return found

    def describe(self) -> str:
        """The state in a line, for a test that fails."""
        try:
            status = self.status()
        except MedusaError as error:
            return f"no status: {error}"
        nodes = [(n["name"], n["state"], [(m["url"][-12:], m["state"], m["fetched_bytes"]) for m in n["models"]],
                  [(i["id"], i["state"]) for i in n["instances"]]) for n in status["nodes"]]  # fmt: skip
        return f"{nodes} {[event['text'] for event in status['events'][-8:]]}"


def start(lab: Laboratory, *flags: str) -> FaultyCluster:
    """A running cluster on a laboratory that has been entered."""
    cluster = FaultyCluster(lab, ["--prewarm", "torch=0", *flags])
    cluster.start()
    return cluster
