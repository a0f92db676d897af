"""Load from clients not written here: hey opens 128 streams at once on one worker, wrk keeps 64 connections busy."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]
STREAMS = 128

pytestmark = pytest.mark.skipif(
    not (shutil.which("hey") and shutil.which("wrk")), reason="needs the load generators: apt-get install hey wrk"
)


def test_many_streams_at_once_without_an_error(launch: Launch) -> None:
    serving = launch("--max-concurrency", str(STREAMS), handler="streaming/handler.py")
    call = ["hey", "-n", str(3 * STREAMS), "-c", str(STREAMS), "-t", "60", "-m", "POST", "-d", "short"]
    ran = subprocess.run([*call, f"http://127.0.0.1:{serving.port}/"], capture_output=True, text=True, check=True)
    assert re.findall(r"\[(\d+)\]\s+(\d+) responses", ran.stdout) == [("200", str(3 * STREAMS))], ran.stdout
    assert "Error distribution" not in ran.stdout
    serving.until(lambda: serving.metric("medusa_requests_in_flight") == 0)
    assert serving.metric("medusa_requests_total") == 3 * STREAMS


def test_busy_connections_without_an_error(launch: Launch, tmp_path: Path) -> None:
    serving = launch(handler="function/handler.py")
    script = tmp_path / "post.lua"
    script.write_text(
        'wrk.method = "POST"\nwrk.body = \'{"name": "you"}\'\nwrk.headers["Content-Type"] = "application/json"\n'
    )
    call = ["wrk", "--threads", "2", "--connections", "64", "--duration", "2s", "--timeout", "60s", "--script", script]
    ran = subprocess.run([*call, f"http://127.0.0.1:{serving.port}/"], capture_output=True, text=True, check=True)
    (count,) = re.findall(r"(\d+) requests in", ran.stdout)
    assert int(count) > 0
    assert "Non-2xx" not in ran.stdout
    assert "Socket errors" not in ran.stdout
