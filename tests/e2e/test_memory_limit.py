"""An instance in a control group with a memory limit: it serves within it, and the kernel's kill is survived."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_HANDLER = """
def handle(request):
    if request.body == b"small":
        return "fine"
    taken = []
    while True:
        taken.append(b"x" * 50_000_000)
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A new control group with the limit of the test's parameter, in MB."""
    version_1 = (_V1 / "cgroup.procs").exists()
    folder = (_V1 if version_1 else _V2) / f"medusa-test-{os.urandom(4).hex()}"
    limit = str(request.param * 1_000_000)
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(limit)
    except OSError as error:
        folder.rmdir()
        pytest.skip(f"this control group takes no memory limit: {error}")
    yield folder
    for _ in range(200):
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.05)
    pytest.fail(f"{folder} still has processes: {(folder / 'cgroup.procs').read_text().split()}")


def inside(group: Path) -> list[str]:
    """A command that moves itself into the group and becomes what follows it."""
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]


@pytest.mark.parametrize("group", [3000, 1000], indirect=True)
def test_a_model_is_served_within_a_limit(group: Path, start: Start, example: Path) -> None:
    serving = start("--model", example, wrapper=inside(group))
    serving.wait_ready()
    asking = [threading.Thread(target=lambda: serving.complete(max_tokens=64)) for _ in range(16)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert 'medusa_process_restarts_total{process="engine"} 0' in serving.request("GET", "/metrics")[1].decode()
    assert serving.stop() == 0


@pytest.mark.parametrize("group", [3000, 1000], indirect=True)
def test_a_worker_that_the_kernel_kills_is_replaced(group: Path, start: Start, tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text(_HANDLER)
    serving = start("--handler", f"{tmp_path}/handler.py:handle", wrapper=inside(group))
    serving.wait_ready()
    worker = serving.child("worker")
    with pytest.raises(OSError, match=r"closed|reset|without response"):
        serving.request("POST", "/", "take all there is", timeout_s=200)
    serving.wait_ready()
    assert serving.child("worker") != worker
    assert serving.request("GET", "/readyz")[0] == 200
    assert serving.stop() == 0
