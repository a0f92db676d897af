"""Processes of the agent that hang, and those that only wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from medusa_runtime.node.child import HungChildren


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
        if found := hung.look({pid: beat_ns}):
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
