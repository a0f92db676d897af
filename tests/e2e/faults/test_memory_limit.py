"""An instance in a control group with a memory limit: it serves within it, and the kernel's kill is survived."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
_MODULE = """
from torch import nn

class Handler:
    def load(self, context):
        layers = (nn.Linear(5000, 2500, bias=False) for _ in range(12))
        self.module = context.weights.build(lambda: nn.Sequential(*layers))

    def predict(self, request):
        return "never"
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


@pytest.mark.parametrize("group", [256], indirect=True)
def test_a_small_container_serves_a_model_that_fits(group: MemoryGroup, start: Start, example: Path) -> None:
    serving = start("--model", example, wrapper=group.inside)
    serving.wait_ready()
    chat = {"messages": [{"role": "user", "content": "What does len return?"}], "max_tokens": 16}
    assert serving.request("POST", "/v1/chat/completions", chat)[0] == 200
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: serving.complete(max_tokens=64), range(32)))
    assert all(answer["choices"][0]["text"] for answer in answers)
    assert serving.stop() == 0
    assert group.kills() == 0


@pytest.mark.parametrize("group", [160], indirect=True)
def test_a_model_that_does_not_fit_is_refused_and_nothing_is_killed(
    group: MemoryGroup, start: Start, example: Path
) -> None:
    serving = start("--model", example, wrapper=group.inside)
    assert serving.process.wait(240) == 2
    assert "of free memory beside the weights" in serving.output()
    assert "give the container more memory [Config.Invalid]" in serving.output()
    assert group.kills() == 0


@pytest.mark.parametrize("group", [400], indirect=True)
def test_a_module_whose_weights_have_to_be_copied_is_refused_and_nothing_is_killed(
    group: MemoryGroup, start: Start, tmp_path: Path
) -> None:
    """They lie in a local file, which takes no memory, at addresses with which products have other bits."""
    size = 2500 * 5000 * 4
    header: dict[str, Any] = {
        f"{number}.weight": {
            "dtype": "F32", "shape": [2500, 5000], "data_offsets": [number * size, (number + 1) * size]
        }
        for number in range(12)
    }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)  # with its length, eight bytes, in front of it
    (tmp_path / "config.json").write_text("{}")
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 12 * size)
    (tmp_path / "handler.py").write_text(_MODULE)
    serving = start(
        "--engine", "none", "--model", tmp_path, "--handler", f"{tmp_path}/handler.py", wrapper=group.inside
    )  # fmt: skip
    assert serving.process.wait(240) == 1
    assert "600 MB of the weights have to be copied" in serving.output()
    assert "--convert) [Weights.TooLarge]" in serving.output()
    assert group.kills() == 0


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


@pytest.mark.parametrize("group", [600], indirect=True)
def test_bodies_take_a_quarter_of_the_limit_at_most(group: MemoryGroup) -> None:
    code = (
        "from medusa_handler.server.gunicorn_options import body_memory_mb; from medusa_runtime.config import Settings"
        "; print(body_memory_mb(Settings()), body_memory_mb(Settings(body_memory_mb=500)))"
    )
    done = subprocess.run([*group.inside, sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "149 500\n"
