"""Signals that come early, twice, or from a terminal that closes; and streams that are closed from the start."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from shifted_clock import ShiftedClock
from waiting import until

Start = Callable[..., Any]

# An instance that is told to stop before its function process is there, which then runs until it hears of it.
_EARLY = """
import os, signal, sys, time
import medusa_runtime.instance.stop_signals
from medusa_runtime.config import Settings
from medusa_runtime.instance import Instance
from medusa_runtime.instance.listeners import bind
from medusa_runtime.timeline import Timeline

medusa_runtime.instance.stop_signals._AGAIN_S = 3600.0
settings = Settings(host="127.0.0.1", port=0, drain_s=600.0)
with Instance(settings, Timeline.create("supervisor"), bind(settings), None) as instance:
    for _ in range(int(sys.argv[1])):
        os.kill(os.getpid(), signal.SIGTERM)
    instance.start(lambda *_: time.sleep(600))
    raise SystemExit(instance.supervise())
"""


@pytest.mark.parametrize("times", [1, 2])  # timeout(1) sends its signal to its child, and to the group both are in
def test_a_stop_before_the_function_process_is_there_is_not_lost(times: int) -> None:
    assert subprocess.run([sys.executable, "-c", _EARLY, str(times)], timeout=240, check=False).returncode == 0


@pytest.mark.forked
def test_a_terminal_that_closes_ends_the_instance_cleanly(start: Start, example: Path) -> None:
    serving = start("--model", example)
    serving.wait_ready()
    descendants = serving.children()
    serving.process.send_signal(signal.SIGHUP)
    assert serving.wait_gone(descendants) == 0


@pytest.mark.forked
def test_a_second_signal_does_not_wait_for_requests(start: Start, tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text(
        "import time\ndef handle(request):\n    print('got it', flush=True)\n    time.sleep(600)"
    )
    serving = start("--handler", f"{tmp_path}/handler.py:handle", "--drain-s", "600")
    serving.wait_ready()
    with closing(http.client.HTTPConnection("127.0.0.1", serving.port, timeout=240)) as client:
        client.request("POST", "/", b"x")
        until(lambda: "got it" in serving.output())
        descendants = serving.children()
        serving.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 60
        while serving.process.poll() is None:  # one that comes too soon is one with the first
            assert time.monotonic() < deadline
            serving.process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        assert serving.wait_gone(descendants) == 1
        assert "still running" not in serving.output()


def test_a_clock_that_is_set_while_it_drains_cuts_no_request_off(start: Start, tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text(
        "import os, time\ndef handle(request):\n"
        "    print('got it', flush=True)\n"
        f"    while not os.path.exists('{tmp_path}/go'):\n        time.sleep(0.05)\n"
        "    return 'done'"
    )
    clock = ShiftedClock(tmp_path)
    serving = start("--handler", f"{tmp_path}/handler.py:handle", "--drain-s", "600", env=clock.environ)
    serving.wait_ready()
    with closing(http.client.HTTPConnection("127.0.0.1", serving.port, timeout=240)) as client:
        client.request("POST", "/", b"x")
        until(lambda: "got it" in serving.output())
        serving.process.send_signal(signal.SIGTERM)
        until(lambda: "waiting for 1 request" in serving.output())
        for hours in (1, -1):
            clock.set(hours * 3600)
            time.sleep(0.5)  # gunicorn looks at the clock every tenth of a second
        children = serving.children()
        (tmp_path / "go").touch()
        assert client.getresponse().read() == b"done"
        assert serving.wait_gone(children) == 0


def test_nothing_is_left_of_a_killed_instance(start: Start, example: Path) -> None:
    serving = start("--model", example)
    serving.wait_ready()
    descendants = serving.children()
    assert {"function", "zygote", "engine"} <= set(descendants.values())
    serving.process.kill()
    assert serving.wait_gone(descendants) == -signal.SIGKILL


@pytest.mark.forked
def test_temporary_files_may_lie_deep(start: Start, example: Path, tmp_path: Path) -> None:
    """The path of a Unix socket may have 107 bytes; the engine's lies under TMPDIR."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    serving = start("--model", example, env={"TMPDIR": str(folder)})
    assert serving.complete()["choices"][0]["text"]
    assert serving.stop() == 0
    assert list(folder.iterdir()) == []


def test_standard_streams_may_be_closed(start: Start, example: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:  # it cannot tell which one it has taken
        port = free.getsockname()[1]
    serving = start("--model", example, "--port", str(port), wrapper=["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"])
    until(lambda: answers(f"http://127.0.0.1:{port}/readyz"))
    assert serving.stop() == 0


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except urllib.error.HTTPError as error:  # 503
        error.close()
    except OSError:  # nobody is there yet
        pass
    return False
