"""The bare Debian root of CI: it says where none can be made, and leaves nothing when it is ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from process_tree import alive, descendants
from waiting import until

BARE_ROOT = Path(__file__).parents[2] / ".ci" / "bare-root"
NOT_POSSIBLE = 75
PATIENCE_S = 120.0


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BARE_ROOT), "echo ran"]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="needs another user than root")
def test_only_root_makes_one() -> None:
    ran = run()
    assert (ran.returncode, ran.stdout) == (NOT_POSSIBLE, "no bare Debian root here: it takes root to make one\n")


@pytest.mark.root
def test_a_missing_tool_is_named(tmp_path: Path) -> None:
    ran = run(PATH=str(tmp_path))
    assert ran.returncode == NOT_POSSIBLE
    assert ran.stdout == "no bare Debian root here: debootstrap is not installed (apt-get install debootstrap)\n"


def may_make_one() -> bool:
    made = all(shutil.which(tool) for tool in ("debootstrap", "git", "unshare", "setpriv"))
    if os.geteuid() != 0 or not made:
        return False
    tried = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


@pytest.mark.root
@pytest.mark.skipif(not may_make_one(), reason="needs root, debootstrap and namespaces")
@pytest.mark.parametrize("ended", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_stays_when_it_is_ended(tmp_path: Path, ended: int) -> None:
    """In the middle of debootstrap, which has mounts and processes of its own by then."""
    process = subprocess.Popen([sys.executable, str(BARE_ROOT), "echo ran"], env=os.environ | {"TMPDIR": str(tmp_path)})
    until(lambda: list(tmp_path.glob("*/root/debootstrap")))
    children = descendants(process.pid)
    assert len(children) >= 2  # setpriv, which became unshare, and debootstrap in it
    process.send_signal(ended)
    assert process.wait(PATIENCE_S) not in (0, NOT_POSSIBLE)
    until(lambda: not any(alive(pid) for pid in children))
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.root
@pytest.mark.skipif(not may_make_one(), reason="needs root, debootstrap and namespaces")
def test_whoever_started_it_may_be_killed(tmp_path: Path) -> None:
    starter = f"import subprocess, sys; subprocess.run([sys.executable, {str(BARE_ROOT)!r}, 'echo ran'])"
    process = subprocess.Popen([sys.executable, "-c", starter], env=os.environ | {"TMPDIR": str(tmp_path)})
    until(lambda: list(tmp_path.glob("*/root/debootstrap")))
    children = descendants(process.pid)
    process.kill()
    process.wait()
    until(lambda: not any(alive(pid) for pid in children))
    until(lambda: not list(tmp_path.iterdir()))
