"""A function's image under what platforms impose: read-only root, any user, no capabilities, no /dev/shm, a limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import EXAMPLE, podman

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1200)]  # the first test may build the base

Start = Callable[..., Any]

CONFINED: tuple[str, ...] = ("--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp:mode=1777", "--cap-drop", "all")
CONFINED += ("--security-opt", "no-new-privileges", "--memory", "1g")
MODEL = ("--volume", f"{EXAMPLE}:/model:ro", "--env", "MEDUSA_MODEL=/model")
FUNCTION = ("--env", "MEDUSA_HANDLER=handler:Handler")
PROMPT = "This function returns"


@pytest.mark.parametrize("uid", ["1000", "0", "65534"])
@pytest.mark.parametrize("shm", [True, False], ids=["shm", "no-shm"])
def test_function_and_openai_routes_answer(start: Start, function_image: str, uid: str, shm: bool) -> None:
    container = start(function_image, *CONFINED, *MODEL, *FUNCTION, "--user", uid, *([] if shm else ["--ipc", "none"]))
    container.wait_ready()
    assert (container.run("test", "-e", "/dev/shm", check=False).returncode == 0) is shm
    status, answer = container.request("POST", "/", {"name": "you"})
    assert (status, answer) == (200, {"hello": "you", "uid": int(uid), "iniconfig": True})
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    status, completion = container.request("POST", "/v1/completions", body)
    assert status == 200
    text = completion["choices"][0]["text"]
    assert text.strip()
    assert container.request("POST", "/", {"prompt": PROMPT}) == (200, {"answer": text})
    assert streamed(container.request("POST", "/v1/completions", body | {"stream": True})[1]) == text
    assert container.run("touch", "/function/x", "/opt/medusa/x", check=False).returncode != 0
    podman("stop", "--time", "20", container.name)
    assert container.state("ExitCode") == "0", container.logs()


def streamed(events: bytes) -> str:
    lines = [line.removeprefix("data: ") for line in events.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


def test_only_tmp_is_written(start: Start, function_image: str) -> None:
    """With a writable root nothing is written to it, so a read-only one loses nothing."""
    container = start(function_image, *MODEL, *FUNCTION, "--tmpfs", "/tmp:mode=1777")
    container.wait_ready()
    assert container.request("POST", "/", {"prompt": PROMPT})[0] == 200
    changes = {line.split()[1] for line in podman("diff", container.name).stdout.splitlines()}
    mounts = ("/model", "/tmp", "/dev", "/proc", "/sys", "/run", "/etc", "/var/run")
    assert [path for path in changes if path != "/" and not path.startswith(mounts)] == []


def test_too_little_memory_is_said(start: Start, function_image: str) -> None:
    container = start(function_image, *CONFINED[:-1], "40m", "--memory-swap", "40m", *MODEL)
    assert container.wait() != 0


def test_sagemaker_starts_it_with_serve(start: Start, base_image: str) -> None:
    """`docker run IMAGE serve`, as root, with the model and the port where SageMaker has them."""
    options = ("--volume", f"{EXAMPLE}:/opt/ml/model:ro", "--env", "SAGEMAKER_BIND_TO_PORT=8099", "--user", "0")
    container = start(base_image, *CONFINED, *options, "--ipc", "none", command=("serve",), port=8099)
    container.wait_ready("/ping")
    status, answer = container.request("POST", "/invocations", {"prompt": PROMPT, "max_tokens": 4, "temperature": 0})
    assert status == 200, answer
    assert answer["choices"][0]["text"].strip()
