"""A cluster in a laboratory starts a model as a group: the group answers, and one instance goes on."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_cluster.json_lines import call
from medusa_cluster.lab.cluster import LabCluster
from medusa_cluster.lab.laboratory import Laboratory
from medusa_cluster.lab.link import Link

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.slow,
]

EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"
MEDUSA = Path(sys.executable).with_name("medusa")
NODE = Path(__file__).parents[2] / "node_without_ray.py"
LINK_BYTES_PER_S = 0.6e6  # 9 s for the model, so that a request is answered before one node has it


class Cluster(LabCluster):
    """A cluster as users start it, with Ray."""

    def is_warm(self, node: str) -> bool:
        status = asyncio.run(call(self.lab.node_folder(node) / "control.sock", {"op": "status"}))
        return bool(status["agent"]["engines"].get("torch", {}).get("warm"))

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.status()["events"]]


class ClusterWithoutRay(Cluster):
    """Its nodes' servers call one another directly: Ray takes longer to start than the test."""

    def start_node(self, node: str) -> None:
        folder, address = self.lab.node_folder(node), self.lab.address(node)
        head = [] if node == self.head else [f"http://{self.lab.address(self.head)}:8114"]
        command = [sys.executable, NODE, node, folder, address, self.token_file, LINK_BYTES_PER_S, *head]
        log = self.log(node)
        self._began[node] = 0
        with open(log, "ab") as out:
            self.servers[node] = self.lab.popen(node, list(map(str, command)), stdout=out, stderr=out)

    def wait_ready(self, node: str) -> None:
        self._until(lambda: b"ready\n" in self.log(node).read_bytes(), self.servers[node], self.log(node))


def until(condition: Callable[[], Any], patience_s: float = 60) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.2)


def completion(url: str, tokens: int) -> str:
    asked = {"model": "m", "prompt": "This function returns", "max_tokens": tokens, "temperature": 0}
    body = json.dumps(asked | {"ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["text"])


@pytest.mark.parametrize("kind", [ClusterWithoutRay, Cluster])
def test_a_group_answers_and_becomes_an_instance(kind: type[Cluster]) -> None:
    with Laboratory(3, Link(LINK_BYTES_PER_S), origin={"m": EXAMPLE}, origin_link=Link(50e6)) as lab:
        cluster = kind(lab)
        cluster.start()
        for node in lab.nodes:
            until(lambda node=node: cluster.is_warm(node))
        cluster.start_gateway(8080)
        url = lab.forward(0, "switch", 8080)
        settings = ["--set", "threads=1", "--set", "device=cpu", "--set", "kv-cache-mb=64"]
        command = ["m", "--model", f"{lab.origin_url}/m", "--max", "1", "--ttft-slo", "6", *settings]
        folder = lab.node_folder("n2")
        lab.run("n2", [MEDUSA, "cluster", "deploy", *command, "--dir", folder], check=True, timeout=60)
        until(lambda: cluster.status()["models"][0]["layers"])  # a node has looked at it
        by_group = completion(url, 24)
        kinds = cluster.kinds()
        assert "group" in kinds
        assert "group-alone" not in kinds
        until(lambda: "group-consolidated" in cluster.kinds())
        until(lambda: len([one for node in cluster.status()["nodes"] for one in node["instances"]]) == 1)
        assert completion(url, 24) == by_group
        (start,) = cluster.status()["models"][0]["starts"]
        assert start["workers"] > 1
        assert 0 < start["predicted_s"] < 6.0
        cluster.call("remove", name="m")
        for process in cluster.servers.values():
            process.terminate()
        for process in cluster.servers.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
