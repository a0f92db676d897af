"""Workers that are forked from xdist's controller run the tests as those do that execnet starts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_tree import alive

CONFTEST = """
import os
import pathlib
import sys
from fork_server import end_shared, share
from forked_workers import fork_workers

def pytest_configure(config):
    if config.getoption("numprocesses", None):
        sys.imported_by = {}
        share("colorsys")
        chosen = [pathlib.Path(argument.partition("::")[0]).absolute() for argument in config.args]
        fork_workers(2, pathlib.Path(__file__).parent, chosen, modules=("none_such", "colorsys"))

def pytest_unconfigure(config):
    if config.getoption("numprocesses", None):
        end_shared()
"""
TESTS = """
import os
import sys
import pytest

sys.imported_by["tests"] = os.getpid()

@pytest.mark.parametrize("number", range(6))
def test_it(number):
    assert "colorsys" in sys.modules
    assert sys.imported_by == {"tests": os.getppid(), "skips": os.getpid()}
    assert os.read(0, 1) == b""
    print("printed", number)
    assert [1, number] != [1, 4]
"""
SKIPS = """
import os
import sys
import pytest

sys.imported_by["skips"] = os.getpid()
pytest.skip("not on this machine", allow_module_level=True)
"""
ASKS = """
import os
import pathlib
import pytest
from fork_server import server_of

@pytest.mark.parametrize("number", range(8))
def test_asks(number):
    with server_of("colorsys") as server:
        assert server.run("builtins:print", ["a"]).stdout == "['a']\\n"
    pathlib.Path(f"worker {os.getpid()}").touch()
    pathlib.Path(f"server {server.pid}").touch()
"""
CRASHES = """
import os
import pytest

@pytest.mark.parametrize("number", range(6))
def test_crashes(number):
    if number == 2:
        os.abort()
"""
HANGS = """
import os
import pathlib
import time

def test_hangs():
    pathlib.Path("unfinished").write_text(str(os.getpid()))
    pathlib.Path("unfinished").rename("worker")
    time.sleep(600)
"""


def start(folder: Path, *arguments: str, chosen: str = "tests", **tests: str) -> subprocess.Popen[str]:
    (folder / "tests").mkdir()
    for name, code in {"conftest": CONFTEST, **tests}.items():
        (folder / "tests" / f"{name}.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "2", "-rs", "--import-mode=importlib", *arguments]
    command += ["--basetemp", str(folder / "temp")]  # or it would close the parent of ours to other users
    environ = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.Popen(
        [*command, chosen],
        cwd=folder,
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_what_is_imported_is_there_and_what_cannot_be_is_tried_again(tmp_path: Path) -> None:
    with start(tmp_path, test_it=TESTS, test_skips=SKIPS) as run:
        output, _ = run.communicate(timeout=120)
    assert run.returncode == 1
    assert "1 failed, 5 passed, 1 skipped" in output
    assert "assert [1, 4] != [1, 4]" in output
    assert "printed 4" in output
    assert "not on this machine" in output


def test_files_that_are_not_chosen_are_not_imported(tmp_path: Path) -> None:
    other = "import pathlib; pathlib.Path('imported').touch()"
    with start(tmp_path, chosen="tests/test_asks.py::test_asks", test_asks=ASKS, test_other=other) as run:
        output, _ = run.communicate(timeout=120)
    assert "8 passed" in output
    assert not (tmp_path / "imported").exists()


def test_workers_that_are_not_needed_end_silently(tmp_path: Path) -> None:
    with start(tmp_path, "--collect-only", "-q", test_hangs=HANGS) as run:
        output, _ = run.communicate(timeout=120)  # until all of them have closed it
    assert run.returncode == 0
    assert "1 test collected" in output
    assert "Traceback" not in output


def test_a_shared_server_serves_all_workers(tmp_path: Path) -> None:
    with start(tmp_path, test_asks=ASKS) as run:
        output, _ = run.communicate(timeout=120)
    assert "8 passed" in output
    assert len(list(tmp_path.glob("worker *"))) == 2
    (server,) = tmp_path.glob("server *")
    assert not alive(int(server.name.split()[1]))


def test_a_worker_that_crashes_is_replaced(tmp_path: Path) -> None:
    with start(tmp_path, test_crashes=CRASHES) as run:
        output, _ = run.communicate(timeout=120)
    assert run.returncode == 1
    assert "1 failed, 5 passed" in output
    assert "crashed while running 'tests/test_crashes.py::test_crashes[2]'" in output


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_workers_end_with_the_controller(tmp_path: Path, how: str) -> None:
    with start(tmp_path, test_hangs=HANGS) as run:
        deadline = time.monotonic() + 60
        while not (tmp_path / "worker").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        worker = int((tmp_path / "worker").read_text())
        getattr(run, how)()
        run.wait(60)
    while alive(worker):
        assert time.monotonic() < deadline
        time.sleep(0.02)
