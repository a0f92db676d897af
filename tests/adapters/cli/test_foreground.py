"""Temporary files of commands that run in a child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

COMMAND = """
import sys, tempfile
from medusa_adapters.cli.foreground import run_in_child

def command():
    open(tempfile.gettempdir() + "/file", "w").close()
    print("begun", flush=True)
    sys.stdin.read()
    return 0

sys.exit(run_in_child(command, (), scratch=True))
"""


def start(folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"TMPDIR": str(folder)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", COMMAND], env=environment, text=True, **pipes)  # type: ignore[call-overload]
    assert process.stdout.readline() == "begun\n"
    return process


def age(folder: Path) -> list[Path]:
    found = sorted(folder.iterdir())
    for one in found:
        os.utime(one, (0, 0))
    return found


def test_the_next_command_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    with start(tmp_path) as running, start(tmp_path) as killed:
        left = age(tmp_path)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        (tmp_path / "medusa-of-others").mkdir()
        with start(tmp_path) as another:
            assert len(list(tmp_path.iterdir())) == 3, "that of the killed command is gone, those that run have theirs"
            assert (tmp_path / "medusa-of-others").exists()
            another.communicate("")
        assert len(set(left) & set(tmp_path.iterdir())) == 1
        running.communicate("")
    assert [path.name for path in tmp_path.iterdir()] == ["medusa-of-others"]
    assert running.returncode == another.returncode == 0
