"""The cpu variant: vLLM and the torch engine serve from it, offline and confined, though Triton is not there."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import EXAMPLE, ROOT, podman

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1200)]

IMAGE = "localhost/medusa-runtime:cpu"
LIMIT_GB = "2.6"
CONFINED = ("--read-only", "--tmpfs", "/tmp:mode=1777", "--cap-drop", "all", "--user", "1000", "--network", "none")
MODEL = ("--volume", f"{EXAMPLE}:/model:ro", "--env", "MEDUSA_MODEL=/model", "--env", "MEDUSA_KV_CACHE_MB=64")
ASK = """
import http.client, json, sys, time
for _ in range(3000):
    try:
        connection = http.client.HTTPConnection("127.0.0.1", 8080, timeout=300)
        connection.request("GET", "/readyz")
        if connection.getresponse().status == 200:
            break
    except OSError:
        pass
    time.sleep(0.1)
body = json.dumps({"prompt": "This function returns", "max_tokens": 8, "temperature": 0, "stream": len(sys.argv) > 1})
connection = http.client.HTTPConnection("127.0.0.1", 8080, timeout=300)
connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
print(connection.getresponse().read().decode())
"""


@pytest.fixture
def image(engine: None) -> str:
    if podman("image", "exists", IMAGE, check=False).returncode:
        pytest.skip(f"{IMAGE} takes minutes to build: make image VARIANTS=cpu")
    return IMAGE


@pytest.mark.parametrize("named", ["vllm", "torch"])  # `engine` is the fixture that skips without podman
def test_both_engines_answer_without_triton_and_network(start: Callable[..., Any], image: str, named: str) -> None:
    container = start(image, *CONFINED, *MODEL, "--env", f"MEDUSA_ENGINE={named}")
    assert container.run("python", "-c", "import triton", check=False).returncode != 0
    answer = json.loads(container.run("python", "-c", ASK).stdout)
    text = answer["choices"][0]["text"]
    assert text.strip()
    events = container.run("python", "-c", ASK, "stream").stdout.split("\n\n")
    assert events[-2] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == text
    podman("stop", "--time", "30", container.name)
    assert container.state("ExitCode") == "0", container.logs()


def test_an_image_with_a_snapshot_of_vllm_continues_from_it(
    start: Callable[..., Any], image: str, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {image}\nENV MEDUSA_ENGINE=vllm\nRUN medusa snapshot\n")
    name = f"localhost/medusa-test-{uuid.uuid4().hex[:12]}"
    try:
        podman("build", "--tag", name, str(tmp_path), timeout_s=600)
        container = start(name, *CONFINED, *MODEL)
        answer = json.loads(container.run("python", "-c", ASK).stdout)
        assert answer["choices"][0]["text"].strip()
        program = podman("exec", container.name, "readlink", "/proc/1/exe").stdout.strip()
        assert program.endswith("/medusa-resume"), container.logs()
        podman("stop", "--time", "30", container.name)
        assert container.state("ExitCode") == "0", container.logs()
        container.remove()
    finally:
        podman("rmi", "--force", name, check=False)


def test_size(image: str) -> None:
    command = [sys.executable, str(ROOT / "images/layers.py"), image, "--limit-gb", LIMIT_GB]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
