"""The image `cluster`: the pods that `medusa deploy cluster` renders, run as containers."""

from __future__ import annotations

import ipaddress
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import EXAMPLE, Container, podman

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(1200)]

IMAGE = "localhost/medusa-runtime:cluster"
NAME, HEAD = "c", "c-head"
ASKED = {"prompt": "This function returns", "max_tokens": 12, "temperature": 0}
STARTS_WITHIN_S = 200.0
Start = Callable[..., Container]


@pytest.fixture(scope="module")
def image(engine: None) -> str:
    if podman("image", "exists", IMAGE, check=False).returncode:
        pytest.skip(f"{IMAGE} takes ten minutes to build: make image VARIANTS=cluster")
    return IMAGE


@pytest.fixture(scope="module")
def rendered(image: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "medusa_adapters", "deploy", "cluster", NAME, "--image", image, "--nodes", "2"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(yaml.safe_load_all(text))


class Pods:
    """Runs pods by podman, each with its own address, as the manifests say: command, mounts, limits of their rights."""

    def __init__(self, start: Start, rendered: list[dict[str, Any]], folder: Path, addresses: Iterator[str]) -> None:
        self._start = start
        self._addresses = addresses
        self._folder = folder
        (secret,) = [item for item in rendered if item["kind"] == "Secret"]
        self._token = folder / "token"
        self._token.touch(0o400)
        self._token.write_text(secret["stringData"]["auth_token"])
        self._head: str | None = None

    def run(self, name: str, pod: dict[str, Any]) -> Container:
        (container,) = pod["containers"]
        address = next(self._addresses)
        self._head = self._head or address
        values = {"$(POD_NAME)": name, "$(POD_IP)": address}
        command = [self._filled(word, values) for word in container["command"]]
        rights = container["securityContext"]
        assert rights["readOnlyRootFilesystem"]
        options = ["--ip", address, "--add-host", f"{HEAD}:{self._head}", "--user", str(rights["runAsUser"])]
        options += ["--read-only", "--read-only-tmpfs=false", "--security-opt", "no-new-privileges"]
        options += [flag for right in rights["capabilities"]["drop"] for flag in ("--cap-drop", right)]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for mount in container["volumeMounts"]:
            options += self._mounted(name, volumes[mount["name"]], mount["mountPath"])
        options += ["--volume", f"{EXAMPLE}:/model:ro", "--entrypoint", json.dumps(command)]
        return self._start(container["image"], *options, port=container["ports"][-1]["containerPort"])

    @staticmethod
    def _filled(word: str, values: dict[str, str]) -> str:
        for name, value in values.items():
            word = word.replace(name, value)
        return word

    def _mounted(self, pod: str, volume: dict[str, Any], path: str) -> list[str]:
        if "secret" in volume:
            return ["--volume", f"{self._token}:{path}/token:ro"]
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            assert path == "/dev/shm"
            return ["--shm-size", volume["emptyDir"]["sizeLimit"].removesuffix("i").lower()]
        folder = self._folder / pod / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
        if "emptyDir" in volume:
            folder.chmod(0o777)  # as a kubelet makes it
        return ["--volume", f"{folder}:{path}"]


@pytest.fixture
def pods(start: Start, rendered: list[dict[str, Any]], tmp_path: Path) -> Pods:
    (network,) = json.loads(podman("network", "inspect", "podman").stdout)
    subnet = ipaddress.ip_network((network.get("subnets") or network["plugins"][0]["ipam"]["ranges"][0])[0]["subnet"])
    free = (str(subnet[number]) for number in range(subnet.num_addresses - 200, subnet.num_addresses - 2))
    return Pods(start, rendered, tmp_path, free)


def test_the_rendered_pods_are_a_cluster_that_serves(pods: Pods, rendered: list[dict[str, Any]]) -> None:
    (ray,) = [item for item in rendered if item["kind"] == "RayCluster"]
    (deployment,) = [item for item in rendered if item["kind"] == "Deployment"]
    head = pods.run("head", ray["spec"]["headGroupSpec"]["template"]["spec"])
    head.wait_ready("/healthz")
    (group,) = ray["spec"]["workerGroupSpecs"]
    worker = pods.run("worker", group["template"]["spec"])
    worker.wait_ready("/healthz")
    gateway = pods.run("gateway", deployment["spec"]["template"]["spec"])
    gateway.wait_ready()

    def medusa(*arguments: str) -> str:
        access = ("--address", HEAD, "--token-file", "/var/run/secrets/medusa/token")
        return gateway.run("medusa", "cluster", *arguments, *access).stdout

    medusa("deploy", "pydoc", "--model", "/model", "--min", "2", "--max", "2")
    deadline = time.monotonic() + STARTS_WITHIN_S
    while True:
        found = json.loads(medusa("status", "--json"))
        if [model["instances"] for model in found["models"]] == [2]:
            break
        if time.monotonic() > deadline:
            pytest.fail(f"no two instances: {found}\n{head.logs()[-3000:]}\n{worker.logs()[-3000:]}")
        time.sleep(0.5)
    status, answer = gateway.request("POST", "/v1/completions", ASKED | {"model": "pydoc"})
    assert status == 200, answer
    text = answer["choices"][0]["text"]
    assert text.strip()
    podman("kill", worker.name)
    for _ in range(3):
        status, answer = gateway.request("POST", "/v1/completions", ASKED | {"model": "pydoc"})
        assert (status, answer["choices"][0]["text"]) == (200, text)
    for container in (gateway, head):
        podman("stop", "--time", "60", container.name, timeout_s=90)
        assert container.state("ExitCode") == "0", container.logs()
