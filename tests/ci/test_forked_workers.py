"""pytest --workers: every test runs once and is reported, whatever happens to the process that runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import os
import signal
import pytest

with open("imported", "a") as imported:
    imported.write("once ")

@pytest.fixture(scope="module")
def shared():
    with open("torn down", "a") as torn:
        yield os.getpid()
        torn.write(f"{os.getpid()} ")

@pytest.mark.parametrize("number", range(30))
def test_some(number, shared, tmp_path):
    print("number", number)
    with open("ran", "a") as ran:
        ran.write(f"{number} {os.getpid()}\\n")
    if number == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    assert number != 5
    if number == 8:
        pytest.skip()
"""

BROKEN = """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    raise SystemError("broken plugin")
    yield
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "forked_workers", "-p", "no:cacheprovider", "-q", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_each_test_runs_once_in_several_processes_and_a_killed_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    ran = run(tmp_path, "--workers", "3", "test_some.py")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "2 failed, 27 passed, 1 skipped" in ran.stdout
    assert "FAILED test_some.py::test_some[7] - the worker that ran it ended with status -9" in ran.stdout
    assert "number 5\n" in ran.stdout, "what a failed test has printed is shown"
    assert "number 6\n" not in ran.stdout
    numbers, pids = zip(*(line.split() for line in (tmp_path / "ran").read_text().splitlines()), strict=True)
    assert sorted(map(int, numbers)) == list(range(30))
    assert len(set(pids)) > 1
    killed = pids[numbers.index("7")]
    assert sorted((tmp_path / "torn down").read_text().split()) == sorted(set(pids) - {killed})
    assert (tmp_path / "imported").read_text() == "once "


def test_no_test_begins_after_as_many_failures_as_are_wanted(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(100))\ndef test(n): 1 / 0"
    )
    ran = run(tmp_path, "--workers", "2", "--maxfail", "3", "test_some.py")
    assert ran.returncode == 1
    assert "stopping after" in ran.stdout
    assert ran.stdout.count("\nFAILED ") < 10


def test_a_worker_that_fails_outside_of_a_test_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(BROKEN)
    (tmp_path / "test_some.py").write_text("def test_one(): pass\ndef test_two(): pass")
    ran = run(tmp_path, "--workers", "2", "test_some.py")
    assert ran.returncode == 1, ran.stdout
    assert "broken plugin" in ran.stderr
    assert "2 failed" in ran.stdout
