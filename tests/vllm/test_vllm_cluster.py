"""`medusa cluster deploy --engine vllm`: instances of vLLM come and go as others do, with weights from a peer."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from medusa_cluster.lab.cluster import LabCluster
from medusa_cluster.lab.laboratory import Laboratory
from medusa_cluster.lab.link import Link

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; see `make test-vllm`"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc-lm"
NODE = Path(__file__).parents[1] / "node_without_ray.py"
LINK_BYTES_PER_S = 50e6
PATIENCE_S = 240.0


class Cluster(LabCluster):
    """Its nodes' servers call one another directly: vLLM's environment has no Ray."""

    def start_node(self, node: str) -> None:
        folder, address = self.lab.node_folder(node), self.lab.address(node)
        head = [] if node == self.head else [f"http://{self.lab.address(self.head)}:8114"]
        command = [sys.executable, NODE, node, folder, address, self.token_file, LINK_BYTES_PER_S, *head]
        self._began[node] = 0
        with open(self.log(node), "ab") as out:
            self.servers[node] = self.lab.popen(node, list(map(str, command)), stdout=out, stderr=out)

    def wait_ready(self, node: str) -> None:
        self._until(lambda: b"ready\n" in self.log(node).read_bytes(), self.servers[node], self.log(node))

    def ready_nodes(self) -> set[str]:
        """The nodes with an instance that listens."""
        return {
            node["name"]
            for node in self.status()["nodes"]
            if any(item["state"] == "ready" for item in node["instances"])
        }

    def received(self, node: str) -> dict[str, int]:
        """How many bytes of the model came from where."""
        (found,) = (one for one in self.status()["nodes"] if one["name"] == node)
        return next((dict(model["received_bytes"]) for model in found["models"]), {})

    def wait_room(self) -> None:
        """Wait until the controller knows how much memory each node's agent has for models."""
        until(lambda: [bool(node["memory_bytes"]) for node in self.status()["nodes"]] == [True] * len(self.lab.nodes))

    def end(self) -> None:
        for process in self.servers.values():
            process.terminate()
        for process in self.servers.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.2)


def completion(url: str, seed: int | None = None) -> str:
    asked: dict[str, Any] = {"model": "m", "prompt": "This function returns", "max_tokens": 24, "ignore_eos": True}
    asked |= {"temperature": 0} if seed is None else {"temperature": 1.0, "seed": seed}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return str(json.load(answer)["choices"][0]["text"])
    except urllib.error.HTTPError as error:
        pytest.fail(f"{error}: {error.read().decode()}")


@pytest.fixture
def lab() -> Iterator[Laboratory]:
    with Laboratory(2, Link(LINK_BYTES_PER_S), origin={"m": EXAMPLE}, origin_link=Link(50e6)) as made:
        yield made


def test_a_second_instance_gets_its_weights_from_a_peer(lab: Laboratory) -> None:
    cluster = Cluster(lab)
    cluster.start()
    cluster.wait_room()
    cluster.start_gateway(8080)
    url = lab.forward(0, "switch", 8080)
    model = f"{lab.origin_url}/m"
    settings = {"threads": "1", "device": "cpu", "kv_cache_mb": "64"}
    command = ["deploy", "m", "--model", model, "--engine", "vllm", "--min", "0", "--max", "2"]
    command += [word for name, value in settings.items() for word in ("--set", f"{name.replace('_', '-')}={value}")]
    medusa = [sys.executable, "-m", "medusa_adapters", "cluster", *command, "--dir", lab.node_folder("n2")]
    lab.run("n2", medusa, check=True, timeout=PATIENCE_S)
    greedy, seeded = completion(url), completion(url, 7)  # the first request starts the first instance
    (first,) = cluster.ready_nodes()
    (second,) = set(lab.nodes) - {first}
    cluster.call("scale", name="m", min=2, max=2)
    until(lambda: cluster.ready_nodes() == set(lab.nodes))
    until(lambda: sum(cluster.received(second).values()))
    peer = f"http://{lab.address(first)}:8114"
    weights = (EXAMPLE / "model.safetensors").stat().st_size
    assert cluster.received(second).get(peer, 0) > weights * 0.9, cluster.received(second)
    assert {completion(url) for _ in range(4)} == {greedy}
    assert {completion(url, 7) for _ in range(4)} == {seeded}
    cluster.call("remove", name="m")
    until(lambda: not cluster.ready_nodes())
    cluster.end()
