"""CI's pytest: what failed runs once more alone, is named, and fails CI where it fails again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from process_tree import alive

PYTEST = Path(__file__).parents[2] / ".ci" / "pytest"
TESTS = """
import os
import pathlib
import pytest

def test_passes():
    with open("passes", "a") as runs:
        runs.write("ran ")

def test_flaky():
    if not os.path.exists("ran"):
        pathlib.Path("ran").touch()
        assert False

@pytest.mark.parametrize("number", range(int(os.environ["BROKEN"])))
def test_broken(number):
    assert False
"""


@pytest.mark.parametrize(("broken", "status"), [(0, 0), (1, 1), (3, 1)])
def test_a_few_failures_run_once_more_alone(tmp_path: Path, broken: int, status: int) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "BROKEN": str(broken)}
    command = [sys.executable, PYTEST, "-q", "-p", "xdist", "test_some.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == status, ran.stdout
    told = [line for line in ran.stdout.splitlines() if line.startswith("==") and line.count("=") < 10]
    if broken == 3:
        assert told == ["== 4 tests failed, which is too many to run them once more"]
    else:
        assert told[0].startswith("== once more, alone and one at a time: test_some.py::test_flaky")
        assert "== failed beside others, passed alone: test_some.py::test_flaky" in told
        assert ("== failed beside others, failed alone, too: test_some.py::test_broken[0]" in told) is (broken == 1)
    assert (tmp_path / "passes").read_text() == "ran "


def test_a_run_that_ends_otherwise_fails(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("import none_such")
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, PYTEST, "-q", "-p", "xdist", "test_some.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == pytest.ExitCode.INTERRUPTED
    assert "once more" not in ran.stdout


STARTS = """
import subprocess
import pytest

@pytest.fixture
def child():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()

def test_it(child):
    print("started", child.pid, flush=True)
    child.wait()
"""


def test_tests_that_are_stopped_end_what_they_started(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(STARTS)
    command = [sys.executable, "-m", "pytest", "-s", "-p", "conftest", "--rootdir", tmp_path, tmp_path / "test_it.py"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environ) as run:
        assert run.stdout
        child = next(int(line.split()[-1]) for line in run.stdout if "started" in line)
        run.send_signal(signal.SIGTERM)
        run.stdout.read()
        assert run.wait(60) == 2
    assert not alive(child)
