"""An instance in a control group with a memory limit: it serves within it, and the kernel's kill is survived."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from memory_group import MemoryGroup, group

__all__ = ["group"]

Start = Callable[..., Any]
_HANDLER = """
def handle(request):
    if b"small" in request.body:
        return "fine"
    taken = []
    while True:
        taken.append(b"x" * 50_000_000)
"""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("group", [3000, 1000], indirect=True)
def test_a_model_is_served_within_a_limit(group: MemoryGroup, start: Start, example: Path) -> None:
    serving = start("--model", example, wrapper=group.inside)
    serving.wait_ready()
    asking = [threading.Thread(target=lambda: serving.complete(max_tokens=64)) for _ in range(16)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    restarts = f'medusa_process_restarts_total{{process="engine",model="{example.name}"}}'
    assert f"{restarts} 0" in serving.request("GET", "/metrics")[1].decode()
    assert serving.stop() == 0


@pytest.mark.parametrize("group", [3000, 1000], indirect=True)
def test_a_worker_that_the_kernel_kills_is_replaced(group: MemoryGroup, start: Start, tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text(_HANDLER)
    serving = start("--handler", f"{tmp_path}/handler.py:handle", wrapper=group.inside)
    serving.wait_ready()
    worker = serving.child("worker")
    with pytest.raises(OSError, match=r"closed|reset|without response"):
        serving.request("POST", "/", "take all there is", timeout_s=200)
    assert serving.request("POST", "/", "small", timeout_s=200)[0] == 200
    assert serving.child("worker") != worker
    assert serving.request("GET", "/readyz")[0] == 200
    assert serving.stop() == 0


@pytest.mark.parametrize("group", [450], indirect=True)
def test_large_bodies_that_come_together_are_answered(group: MemoryGroup, start: Start, example: Path) -> None:
    serving = start("--model", example, wrapper=group.inside)
    serving.wait_ready()
    worker, statuses, body = (
        serving.child("worker"),
        [],
        json.dumps({"prompt": "many words " * 2_700_000, "max_tokens": 1}),
    )
    serving.complete(max_tokens=1)
    asking = [
        threading.Thread(
            target=lambda: statuses.append(serving.request("POST", "/v1/completions", body, timeout_s=200)[0])
        )
        for _ in range(8)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(statuses) == 8
    assert set(statuses) <= {400, 413, 503}
    assert (serving.child("worker"), group.kills()) == (worker, 0)
    assert serving.stop() == 0
