"""Real images and containers: built with podman as `make image` does, and removed again (the base image is kept)."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples/pydoc-lm"
BASE = "localhost/medusa-runtime:slim"
HANDLER = """
import os

import iniconfig  # of requirements.txt


class Handler:
    def load(self, context):
        self.model = context.model

    def predict(self, request):
        body = request.json
        if "prompt" in body:
            return {"answer": self.model.generate(body["prompt"], max_tokens=8, temperature=0)}
        return {"hello": body["name"], "uid": os.getuid(), "iniconfig": bool(iniconfig.IniConfig)}
"""
DOCKERFILE = "FROM {base}\nCOPY handler.py requirements.txt ./\nRUN medusa-install\n"


def load(name: str) -> Any:
    """A script of images/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"medusa_images_{name}", ROOT / f"images/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def podman(*arguments: str, check: bool = True, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False, timeout=timeout_s)
    if check and ran.returncode:
        pytest.fail(f"podman {' '.join(arguments)}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    return ran


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An environment in which podman works."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    added = load("podman").environment(tmp_path_factory.mktemp("containers"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in added.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def base_image(engine: None) -> str:
    """The slim image of the sources as they are; set MEDUSA_TEST_IMAGE to test another."""
    given = os.environ.get("MEDUSA_TEST_IMAGE")
    if given:
        return given
    built = subprocess.run(
        [sys.executable, str(ROOT / "images/build.py"), "slim"], capture_output=True, text=True, check=False
    )
    if built.returncode:
        pytest.fail(f"make image: {built.stdout[-3000:]}{built.stderr[-3000:]}")
    return BASE


@pytest.fixture(scope="session")
def build_function(engine: None, base_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Build a user's three-line Dockerfile: returns the image's name (None: it failed) and what was said."""
    made = []

    def build_it(requirements: str) -> tuple[str | None, str]:
        folder = tmp_path_factory.mktemp("function")
        (folder / "handler.py").write_text(HANDLER)
        (folder / "requirements.txt").write_text(requirements)
        (folder / "Dockerfile").write_text(DOCKERFILE.format(base=base_image))
        name = f"localhost/medusa-test-{uuid.uuid4().hex[:12]}"
        # A user's machine reaches a registry of packages by itself; this one lends its settings to the build.
        lent = load("host").user_build_flags(tmp_path_factory.mktemp("settings"))
        # With layers, a build that fails leaves an image without a name of the steps before.
        flags = ("--network", "host", "--layers=false", "--tag", name, *lent)
        ran = podman("build", *flags, str(folder), check=False, timeout_s=600)
        if ran.returncode:
            return None, ran.stdout + ran.stderr
        made.append(name)
        return name, ran.stdout + ran.stderr

    yield build_it
    for name in made:
        podman("rmi", "--force", name, check=False)


@pytest.fixture(scope="session")
def function_image(build_function: Any) -> str:
    name, output = build_function("iniconfig==2.1.0\ntorch\n")
    assert name is not None, output
    return str(name)


class Container:
    """A running container whose port 8080 (or another) is published on loopback."""

    def __init__(self, image: str, *options: str, command: tuple[str, ...] = (), port: int = 8080) -> None:
        self.name = f"medusa-test-{uuid.uuid4().hex[:12]}"
        podman("run", "--detach", "--name", self.name, "--publish", f"127.0.0.1::{port}", *options, image, *command)
        self._inside_port = port

    @property
    def port(self) -> int:
        return int(podman("port", self.name, f"{self._inside_port}/tcp").stdout.strip().rpartition(":")[2])

    def connect(self, timeout_s: float = 60.0) -> http.client.HTTPConnection:
        deadline = time.monotonic() + timeout_s
        port = self.port
        while time.monotonic() < deadline:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
            try:
                connection.request("GET", "/livez")
                connection.getresponse().read()
            except OSError:
                connection.close()
                self.check_running()
                time.sleep(0.05)
            else:
                return connection
        return pytest.fail(f"nothing answered within {timeout_s} s: {self.logs()}")

    def request(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        connection = self.connect()
        try:
            encoded = None if body is None else json.dumps(body)
            connection.request(method, path, encoded, {"Content-Type": "application/json"} if encoded else {})
            response = connection.getresponse()
            data = response.read()
            is_json = "json" in (response.getheader("Content-Type") or "")
            return response.status, json.loads(data) if is_json else data
        finally:
            connection.close()

    def wait_ready(self, path: str = "/readyz") -> None:
        for _ in range(600):
            if self.request("GET", path)[0] == 200:
                return
            time.sleep(0.1)
        pytest.fail(f"not ready: {self.logs()}")

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return podman("exec", self.name, *command, check=check)

    def state(self, field: str) -> str:
        return podman("inspect", "--format", f"{{{{.State.{field}}}}}", self.name).stdout.strip()

    def check_running(self) -> None:
        if self.state("Running") != "true":
            pytest.fail(f"ended with {self.state('ExitCode')}: {self.logs()}")

    def logs(self) -> str:
        ran = podman("logs", self.name, check=False)
        return ran.stdout + ran.stderr

    def wait(self) -> int:
        return int(podman("wait", self.name).stdout.strip())

    def remove(self) -> None:
        podman("rm", "--force", "--time", "0", self.name, check=False)


@pytest.fixture
def start(engine: None) -> Iterator[Callable[..., Container]]:
    started: list[Container] = []

    def start(image: str, *options: str, command: tuple[str, ...] = (), port: int = 8080) -> Container:
        started.append(Container(image, *options, command=command, port=port))
        return started[-1]

    yield start
    for container in started:
        container.remove()
