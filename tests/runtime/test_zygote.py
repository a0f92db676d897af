"""A zygote and engines that end: by a signal, by asking for another one, or because they cannot get ready."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENGINE = """
import os, pathlib, signal
info = None

def preimport(settings, region):
    pass

class Engine:
    def __init__(self, region, settings, timeline):
        counter = pathlib.Path({counter!r})
        counter.write_text(counter.read_text() + "x")
        {end}
    def run(self, stop):
        stop.wait(30)
    def wait_ready(self):
        {ready}
    def close(self):
        pass
"""
ZYGOTE = """
import logging, socket, sys
from medusa_runtime import registry, zygote
from medusa_runtime.config import Settings
from medusa_runtime.errors import MedusaError
from medusa_runtime.liveness import Heartbeats
from medusa_runtime.process import ReportPipe
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

kind = registry.EngineKind("ending", "engine_that_ends:Engine", "engine_that_ends:preimport", ())
registry.register(kind)
process = {"timeline": Timeline.create("zygote"), "reports": ReportPipe(), "heartbeats": Heartbeats()}
logging.basicConfig(stream=sys.stdout)
listener = socket.socket(socket.AF_UNIX)
settings = Settings(engine="ending", device="cpu", graphs="capture")
try:
    status = zygote.Zygote(listener, Region.create(), settings, **process).run()
except MedusaError as error:
    print(error)
    status = 3
print(*process["reports"].read())
sys.exit(status)
"""


def engines(folder: Path, end: str = "pass", ready: str = "pass") -> tuple[int, str, int]:
    """The zygote's status and output, and how many engines it forked."""
    counter = folder / "counter"
    counter.write_text("")
    (folder / "engine_that_ends.py").write_text(ENGINE.format(counter=str(counter), end=end, ready=ready))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = [sys.executable, "-c", ZYGOTE]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, len(counter.read_text())


@pytest.mark.parametrize(("name", "meaning"), [("SIGILL", "instructions"), ("SIGKILL", "memory ran out")])
def test_a_start_that_is_killed_names_the_signal_and_what_it_means(tmp_path: Path, name: str, meaning: str) -> None:
    status, said, forked = engines(tmp_path, f"os.kill(os.getpid(), signal.{name})")
    assert (status, forked) == (3, 3)
    assert f"killed by {name} 3 times in a row, before it was ready: " in said
    assert meaning in said


def test_an_engine_may_ask_once_for_another(tmp_path: Path) -> None:
    status, said, forked = engines(tmp_path, "os._exit(75)")
    assert (status, forked) == (75, 2)
    assert said.count("--graphs capture has no effect on a CPU") == 1


def test_an_engine_that_cannot_become_ready_for_an_unknown_reason_ends_and_reports_it(tmp_path: Path) -> None:
    status, said, forked = engines(tmp_path, ready="raise RuntimeError('torch has no such kernel')")
    assert (status, forked) == (0, 1)
    assert "engine failed: RuntimeError: torch has no such kernel" in said
