"""The engine process on a GPU: its context is made while it imports, and the zygote never touches CUDA."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from medusa_runtime.timeline import Stage, Timeline

EXAMPLE = Path(__file__).parents[3] / "examples/pydoc-lm"
ENGINE = """
import os, pathlib, threading
pathlib.Path({gate!r}).touch()  # a context is not made before this runs, so waiting for it first would never end

class Engine:
    def __init__(self, region, settings, timeline):
        timeline.mark("up", pid=os.getpid(), device=settings.device)
        self.info = None
    def run(self, stop):
        stop.wait()
    def wait_ready(self):
        pass
    def close(self):
        pass
"""
ZYGOTE = """
import socket, sys
from functools import partial
from medusa_runtime import registry, zygote
from medusa_runtime.config import Settings
from medusa_runtime.device.context import DeviceContext
from medusa_runtime.liveness import Heartbeats
from medusa_runtime.process import ReportPipe
from medusa_runtime.timeline import Timeline
from medusa_runtime.region.reader import Region

timeline, library, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
zygote.choose = lambda asked, environ: "cuda"
zygote.DeviceContext = partial(DeviceContext, library=library)
registry.register(registry.engine_kind("torch")._replace(open="engine_on_a_fake_gpu:Engine"))
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()
process = {"timeline": Timeline(timeline, "zygote"), "reports": ReportPipe(), "heartbeats": Heartbeats()}
sys.exit(zygote.Zygote(listener, Region.create(), Settings(), **process).run())
"""


WORKER = """
import signal, sys, threading, time
from functools import partial
from pathlib import Path
from medusa_cluster.group import worker
from medusa_runtime import registry
from medusa_runtime.device.context import DeviceContext

library, model, group, folder = sys.argv[1:]
worker.choose = lambda asked, environ: "cuda"
worker.DeviceContext = partial(DeviceContext, library=library)
registry.register(registry.engine_kind("group")._replace(open="engine_on_a_fake_gpu:Engine"))
arguments = ["--model", model, "--group", group, "--layers", "0:1"]
sys.exit(worker.main([*arguments, "--socket", f"{folder}/socket", "--timeline", f"{folder}/timeline"]))
"""


class Start:
    """A zygote whose GPU is the fake driver's, in a process of its own."""

    def __init__(self, folder: Path, fake_cuda: str) -> None:
        self.library = str(shutil.copy(fake_cuda, folder / "libcuda.so.1"))
        self.timeline = Timeline.create("test")
        gate = str(folder / "gate")
        (folder / "engine_on_a_fake_gpu.py").write_text(ENGINE.format(gate=gate))
        command = [sys.executable, "-c", ZYGOTE, str(self.timeline.fd), self.library, str(folder / "socket")]
        environ = {**os.environ, "FAKE_CUDA_GATE": gate, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
        self.process = subprocess.Popen(command, env=environ, pass_fds=(self.timeline.fd,))

    def close(self) -> None:
        self.process.kill()  # and its engines with it
        self.process.wait(60)
        self.timeline.close()


@pytest.fixture
def start(tmp_path: Path, fake_cuda: str) -> Iterator[Start]:
    started = Start(tmp_path, fake_cuda)
    yield started
    started.close()


def test_context_and_imports_overlap_and_a_crashed_engine_comes_back(start: Start) -> None:
    timeline = start.timeline
    (up,) = wait_for(timeline, "up", 1)
    wait_for(timeline, "ready", 1)
    assert up.detail["device"] == "cuda"
    stages = {stage.name: stage for stage in timeline.stages() if stage.process == "engine"}
    # The fake makes no context before the engine's module is imported: it returned, so they ran side by side.
    assert stages["context"].start_ns < stages["import"].end_ns
    assert start.library in maps(up.detail["pid"])
    imports = wait_for(timeline, "import", 2)
    assert [stage.process for stage in imports] == ["engine", "zygote"]
    assert imports[1].start_ns >= wait_for(timeline, "ready", 1)[0].start_ns, "it imported while the engine started"
    assert start.library not in maps(start.process.pid), "the zygote loaded the driver"

    os.kill(up.detail["pid"], signal.SIGKILL)
    second = wait_for(timeline, "up", 2)[1]
    assert second.detail["pid"] != up.detail["pid"]
    assert len(wait_for(timeline, "context", 2)) == 2
    assert start.library not in maps(start.process.pid)


def test_a_worker_of_a_group_makes_its_context_while_it_imports(tmp_path: Path, fake_cuda: str) -> None:
    gate, runs = tmp_path / "gate", tmp_path / "runs"
    engine = ENGINE.format(gate=str(gate)).replace("stop.wait()", f"pathlib.Path({str(runs)!r}).touch(); stop.wait()")
    (tmp_path / "engine_on_a_fake_gpu.py").write_text(engine)
    command = [sys.executable, "-c", WORKER, fake_cuda, str(EXAMPLE), "group.json", str(tmp_path)]
    environ = {**os.environ, "FAKE_CUDA_GATE": str(gate), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with subprocess.Popen(command, env=environ) as process:
        try:
            deadline = time.monotonic() + 90
            while not runs.exists():  # a worker that waits for its context first would never get there
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
    lines = (tmp_path / "timeline").read_bytes().splitlines()
    stages = {stage.name: stage for stage in (Stage(*json.loads(line)) for line in lines)}
    assert stages["up"].detail["device"] == "cuda"
    assert stages["context"].start_ns < stages["import"].end_ns


def wait_for(timeline: Timeline, name: str, count: int) -> list[Stage]:
    deadline = time.monotonic() + 90
    while len(found := [stage for stage in timeline.stages() if stage.name == name]) < count:
        assert time.monotonic() < deadline, f"{name} did not happen: {timeline.stages()}"
        time.sleep(0.01)
    return found


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()
