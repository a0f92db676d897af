"""The cpu variant: vLLM serves from it, offline and confined, though Triton is not there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import EXAMPLE, ROOT, podman

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1200)]

IMAGE = "localhost/medusa-runtime:cpu"
LIMIT_GB = "2.6"
SERVER = ("-m", "vllm.entrypoints.openai.api_server", "--model", "/model", "--served-model-name", "m")
SERVER += ("--enforce-eager", "--host", "0.0.0.0", "--port", "8080", "--max-model-len", "256")
CONFINED = ("--read-only", "--tmpfs", "/tmp:mode=1777", "--cap-drop", "all", "--user", "1000")
# On a CPU vLLM always takes its executor of many processes, which wants 160 MB of shared memory; the default is 64.
CONFINED += ("--shm-size", "256m")
OFFLINE = ("--env", "HF_HUB_OFFLINE=1", "--env", "VLLM_CPU_KVCACHE_SPACE=1", "--env", "VLLM_NO_USAGE_STATS=1")


@pytest.fixture
def image(engine: None) -> str:
    if podman("image", "exists", IMAGE, check=False).returncode:
        pytest.skip(f"{IMAGE} takes minutes to build: make image VARIANTS=cpu")
    return IMAGE


def test_vllm_answers_without_triton(start: Callable[..., Any], image: str) -> None:
    options = (*CONFINED, *OFFLINE, "--volume", f"{EXAMPLE}:/model:ro", "--entrypoint", "python")
    container = start(image, *options, command=SERVER)
    assert container.run("python", "-c", "import triton", check=False).returncode != 0
    container.connect(timeout_s=300.0).close()
    container.wait_ready("/health")
    body = {"model": "m", "prompt": "This function returns", "max_tokens": 8, "temperature": 0}
    status, answer = container.request("POST", "/v1/completions", body)
    assert status == 200, answer
    assert answer["choices"][0]["text"].strip()


def test_the_torch_engine_answers_too(start: Callable[..., Any], image: str) -> None:
    options = (*CONFINED, "--volume", f"{EXAMPLE}:/model:ro", "--env", "MEDUSA_MODEL=/model")
    container = start(image, *options)
    container.wait_ready()
    assert container.request("POST", "/v1/completions", {"prompt": "This", "max_tokens": 4})[0] == 200


def test_size(image: str) -> None:
    command = [sys.executable, str(ROOT / "images/layers.py"), image, "--limit-gb", LIMIT_GB]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
