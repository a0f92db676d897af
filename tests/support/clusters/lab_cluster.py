"""Clusters in laboratories, as tests of groups and of vLLM ask and watch them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fake_nvml
import pytest
from medusa_cluster.json_lines import call
from medusa_cluster.lab.cluster import LabCluster
from medusa_cluster.lab.laboratory import ORIGIN, SWITCH, Laboratory
from medusa_cluster.lab.link_speed import LinkSpeed
from waiting import until

EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"
NODE = Path(__file__).with_name("node_without_ray.py")
GPU_NODES = Path(__file__).parents[1] / "gpus/gpu_nodes"
HELD_ORIGIN = Path(__file__).parents[1] / "servers/held_origin.py"
PATIENCE_S = 240.0
SETTINGS = {"threads": "1", "device": "cpu", "kv_cache_mb": "64"}
GROUP_LINK = LinkSpeed(0.6e6)  # 10 s for the example
GROUP_SLO_S = 6.0
_SHOWN_CHARACTERS = 2000  # of a node's log


class ClusterWithRay(LabCluster):
    """A cluster as users start it. ``settings`` are those of its deployments."""

    settings = SETTINGS

    def is_warm(self, node: str, engine: str = "torch") -> bool:
        """Return whether the node's agent has an idle process for this engine."""
        status = asyncio.run(call(self.lab.node_folder(node) / "control.sock", {"op": "status"}))
        return bool((status["agent"] or {}).get("engines", {}).get(engine, {}).get("warm"))

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.status()["events"]]

    def instances(self) -> list[Any]:
        """The instances of all nodes, as these describe them."""
        sockets = [self.lab.node_folder(node) / "control.sock" for node in self.lab.nodes]
        return [item for path in sockets for item in asyncio.run(call(path, {"op": "status"}))["instances"]]

    def told(self) -> str:
        """The cluster's events, the ends of its nodes' logs and its instances' logs, as text."""
        lines = [f"{event['at']:.1f} {event['kind']}: {event['text']}" for event in self.status()["events"]]
        for node in self.lab.nodes:
            lines += [f"{node}:", self.log(node).read_text()[-_SHOWN_CHARACTERS:]]
            for path in (self.lab.node_folder(node) / "logs").glob("instance-*.log"):
                lines += [f"{node}: {path.name}:", path.read_text()]
        return "\n".join((*lines, str(self.instances())))

    def ready_nodes(self) -> set[str]:
        """The nodes with an instance that listens."""
        found = self.status()["nodes"]
        return {node["name"] for node in found if any(item["state"] == "ready" for item in node["instances"])}

    def ask_for_a_group(self, url: str, engine: str, seeds: Sequence[int | None] = (None,)) -> list[Future[str]]:
        """Deploy the example as m, so that several nodes start it, and return what requests for it will get.

        Every node has ``GROUP_LINK``, and the laboratory no origin. No weights leave this one's until the group has
        been decided on: a node that has half of them needs no group.
        """
        opened = self.lab.node_folder(SWITCH) / "opened"
        command = [sys.executable, HELD_ORIGIN, self.lab.address(ORIGIN), f"m={EXAMPLE}", opened]
        origin = self.lab.popen(ORIGIN, list(map(str, command)), stdout=subprocess.PIPE, text=True)
        assert origin.stdout
        with origin.stdout as said:
            assert said.readline(), "the origin has ended"
        self.deploy("m", engine=engine, max=1, ttft_slo_s=GROUP_SLO_S, settings=self.settings)
        until(lambda: self.status()["models"][0]["layers"], self.told)  # a node has looked at it
        pool = ThreadPoolExecutor(len(seeds))
        asked = [pool.submit(completion, url, seed) for seed in seeds]
        pool.shutdown(wait=False)
        until(lambda: {"group", "scale-up"} & set(self.kinds()), self.told)
        opened.touch()
        assert "group" in self.kinds(), self.told()
        return asked

    def end(self) -> None:
        """Have the nodes end in order."""
        for process in self.servers.values():
            process.terminate()
        for process in self.servers.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


class ClusterWithoutRay(ClusterWithRay):
    """Its node servers call one another directly: Ray takes longer to start than most tests, or is not installed."""

    def __init__(self, lab: Laboratory, prewarm: str = "torch=1", memory_budget: str = "") -> None:
        super().__init__(lab)
        self._settings = {"PREWARM": prewarm, "MEMORY_BUDGET": memory_budget}

    def start_node(self, node: str) -> None:
        folder, address, link = self.lab.node_folder(node), self.lab.address(node), self.lab.link
        assert link is not None
        head = [] if node == self.head else [f"http://{self.lab.address(self.head)}:8114"]
        command = [sys.executable, NODE, node, folder, address, self.token_file, link.bytes_per_s, *head]
        self._began[node] = 0
        with open(self.log(node), "ab") as out:
            self.servers[node] = self.lab.popen(
                node, list(map(str, command)), stdout=out, stderr=out, env=os.environ | self._settings
            )

    def wait_ready(self, node: str) -> None:
        self._until(lambda: b"ready\n" in self.log(node).read_bytes(), self.servers[node], self.log(node))


class ClusterOfGpus(ClusterWithoutRay):
    """Each node has ``gpus_each`` GPUs, whose memory is the host's (``gpu_nodes``)."""

    settings = SETTINGS | {"device": "cuda"}
    gpus_each = 1

    def __init__(self, lab: Laboratory) -> None:
        super().__init__(lab)
        nvml = fake_nvml.build(lab.folder)
        described = "\n".join(f"A10,GPU-{number},24000,23000,4,16" for number in range(self.gpus_each))
        self._settings |= {"PYTHONPATH": str(GPU_NODES), "NVML": nvml, "FAKE_GPUS": described}


class ClusterOfPairsOfGpus(ClusterOfGpus):
    gpus_each = 2


def completion(url: str, seed: int | None = None, tokens: int = 24, prompt: str = "This function returns") -> str:
    """Return what the gateway at ``url`` answers, greedily or with this seed."""
    asked: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    asked |= {"temperature": 0} if seed is None else {"temperature": 1.0, "seed": seed}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return str(json.load(answer)["choices"][0]["text"])
    except urllib.error.HTTPError as error:
        pytest.fail(f"{error}: {error.read().decode()}")
