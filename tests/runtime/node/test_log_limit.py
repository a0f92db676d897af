"""The lines that an engine process of another user's function may write to the agent's log."""

from __future__ import annotations

import io
import logging
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.node.client import NodeClient
from medusa_runtime.node.engines import log_limit
from medusa_runtime.node.engines.log_limit import LogLimit
from medusa_runtime.process import ReportPipe
from medusa_runtime.timeline import Timeline
from strangers import MALLORY, as_user


def test_lines_beyond_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(log_limit.time, "monotonic", lambda: now[0])
    written = io.StringIO()
    handler, logger = logging.StreamHandler(written), logging.Logger("limited")
    handler.addFilter(LogLimit())
    logger.addHandler(handler)
    for number in range(1000):
        logger.error("line %d", number)
    assert written.getvalue().count("\n") == 100
    now[0] += 1.5
    for number in range(1000, 1010):
        logger.error("line %d", number)
    assert written.getvalue().splitlines()[100:] == ["line 1000 (900 lines before it left out)"]


@pytest.mark.root
@pytest.mark.timeout(200)
def test_a_function_cannot_fill_the_agents_log_through_its_engine(
    start_node: Callable[..., Any], tmp_path: Path
) -> None:
    for above in (tmp_path, *tmp_path.parents):
        if above == tmp_path or above.name.startswith(("pytest-", "popen-")):
            above.chmod(0o755)
    model = tmp_path / "m"
    shutil.copytree(Path(__file__).parents[3] / "examples" / "pydoc-lm", model)
    node = start_node("--prewarm", "torch=1")
    node.wait_warm()

    def attack() -> str:
        timeline, reports, listener = Timeline.create("t"), ReportPipe(), socket.socket(socket.AF_UNIX)
        listener.bind("\0medusa-test-flood")
        listener.listen()
        client, ends = NodeClient(node.socket), socket.socketpair()
        client.region(str(model)).close()
        given = [listener.fileno(), timeline.fd, reports.write_fd, ends[0].fileno()]
        client.engine("torch", {"model": str(model), "state": "none", "kv_cache_mb": 64}, given)
        for _ in range(300):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect("\0medusa-test-flood")
                connection.sendall(b"\xff" * 8)  # no frame is that long
                connection.settimeout(30)
                connection.recv(1)
        return "done"

    began = time.monotonic()
    assert as_user(MALLORY, attack) == "done"
    assert 50 <= node.output().count("engine connection dropped") <= 100 + time.monotonic() - began
