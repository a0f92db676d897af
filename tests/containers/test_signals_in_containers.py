"""The entrypoint is PID 1: it gets SIGTERM itself, drains, and ends with 0, in every phase of the start."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import EXAMPLE, podman

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1200)]  # the first test may build the base

Start = Callable[..., Any]

MODEL = ("--volume", f"{EXAMPLE}:/model:ro", "--env", "MEDUSA_MODEL=/model", "--read-only", "--tmpfs", "/tmp:mode=1777")


def test_a_stream_is_served_to_its_end_after_sigterm(start: Start, base_image: str) -> None:
    container = start(base_image, *MODEL)
    container.wait_ready()
    assert container.run("cat", "/proc/1/cmdline").stdout.split("\0")[1:3] == ["/opt/medusa/bin/medusa", "serve"]
    connection = container.connect()
    body = {"prompt": "This", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    first = response.readline()
    podman("kill", "--signal", "TERM", container.name)
    rest = response.read()
    connection.close()
    assert first.startswith(b"data: {")
    assert rest.rstrip().endswith(b"data: [DONE]")
    assert container.wait() == 0, container.logs()


def test_sigterm_at_once_ends_it(start: Start, base_image: str) -> None:
    """As early as podman can send it. Until Python has run, PID 1 has no handler and the kernel drops the signal."""
    container = start(base_image, *MODEL)
    while container.run("cat", "/proc/1/comm", check=False).stdout.strip() == "":
        pass
    container.connect().close()
    podman("kill", "--signal", "TERM", container.name)
    assert container.wait() == 0, container.logs()


def test_a_wrong_setting_ends_with_one_line(start: Start, base_image: str) -> None:
    container = start(base_image, "--env", "MEDUSA_ENGINE=fast", "--env", "MEDUSA_MODEL=/model")
    assert container.wait() == 2
    assert container.logs().strip().splitlines()[-1].startswith("medusa: MEDUSA_ENGINE='fast' cannot be used")


def test_nothing_is_left_of_a_killed_engine(start: Start, base_image: str) -> None:
    """PID 1 reaps what lost its parent: no zombies stay."""
    container = start(base_image, *MODEL)
    container.wait_ready()
    script = (
        "import os, pathlib, signal\n"
        "for path in pathlib.Path('/proc').glob('[0-9]*'):\n"
        "    if (path / 'comm').read_text().strip() == 'engine': os.kill(int(path.name), signal.SIGKILL)\n"
    )
    container.run("python", "-c", script)
    body = {"prompt": "This", "max_tokens": 2, "temperature": 0}
    answers = {container.request("POST", "/v1/completions", body)[0] for _ in range(20)}
    assert 200 in answers
    count = "import pathlib; print(sum(')' in s and s.rpartition(')')[2].split()[0] == 'Z' for s in "
    count += "(p.read_text() for p in pathlib.Path('/proc').glob('[0-9]*/stat'))))"
    assert container.run("python", "-c", count).stdout.strip() == "0"
