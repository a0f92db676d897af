"""Processes of the agent that hang, and those that only wait."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from medusa_runtime.node.child import HungChildren, Reaper, start_child
from medusa_runtime.process import ReportPipe
from medusa_runtime.timeline import Timeline
from process_tree import alive


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for its input, and has been doing that for a moment."""
    with subprocess.Popen([sys.executable, "-c", "print('up', flush=True); input()"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def reason(pid: int, beat_ns: Callable[[], int], seconds: float) -> str | None:
    """Look for so long; why the process is found to hang, if it is."""
    hung, end = HungChildren(), time.monotonic() + seconds
    while time.monotonic() < end:
        if found := hung.find_hung({pid: beat_ns}):
            return found[pid]
        time.sleep(0.1)
    return None


def test_one_that_beats_or_is_waited_for_does_not_hang(
    waiting: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_runtime.liveness.SILENT_S", 0.5)
    assert reason(waiting.pid, time.monotonic_ns, 1.5) is None


def test_one_without_a_heartbeat_hangs(waiting: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_runtime.liveness.SILENT_S", 0.5)
    assert "no sign of life" in (reason(waiting.pid, lambda: 0, 10) or "")


def test_one_that_is_stopped_hangs_whatever_its_heartbeat(waiting: subprocess.Popen[bytes]) -> None:
    os.kill(waiting.pid, signal.SIGSTOP)
    assert "stopped (SIGSTOP)" in (reason(waiting.pid, time.monotonic_ns, 10) or "")


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A control group whose processes get no CPU while it is frozen, not even to die."""
    folder = Path("/sys/fs/cgroup/freezer", f"medusa-test-{os.urandom(4).hex()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no freezer of control groups' version 1: {error}")
    yield folder
    (folder / "freezer.state").write_text("THAWED")
    while folder.exists():
        with contextlib.suppress(OSError):
            folder.rmdir()


@pytest.mark.root
def test_one_that_takes_long_to_die_is_not_waited_for(freezer: Path) -> None:
    timeline, reports = Timeline.create("t"), ReportPipe()
    child = start_child("child", lambda *_: time.sleep(60) or 0, timeline=timeline, reports=reports)
    (freezer / "cgroup.procs").write_text(str(child.pid))
    (freezer / "freezer.state").write_text("FROZEN")
    while (freezer / "freezer.state").read_text() != "FROZEN\n":
        pass
    reaper = Reaper()
    reaper.kill(child)
    reaper.reap()
    assert alive(child.pid)
    (freezer / "freezer.state").write_text("THAWED")
    while Path(f"/proc/{child.pid}").exists():
        reaper.reap()
    reaper.wait()
    timeline.close()
    reports.close()
