"""A worker of Ray that hangs before its title says which actor it is to be."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_nodes import ClusterNode

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

# Stands in for a package that the controller's module imports: the first worker of Ray that imports it hangs.
HANGS = """
import importlib, os, pathlib, signal, sys, threading

here = pathlib.Path(__file__).parent
if pathlib.Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0 ") == b"ray::IDLE":
    try:
        (here / "hang").rename(here / "hung")
    except FileNotFoundError:
        pass
    else:
        HANG
sys.path.remove(str(here))
del sys.modules["yarl"]
importlib.import_module("yarl")
"""


@pytest.fixture(params=["threading.Event().wait()", "os.kill(os.getpid(), signal.SIGSTOP)"], ids=["waits", "stopped"])
def head(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ClusterNode]:
    (tmp_path / "yarl.py").write_text(HANGS.replace("HANG", request.param))
    (tmp_path / "hang").touch()
    node = ClusterNode("head", 0, environ={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"})
    yield node
    node.close()


def test_a_worker_that_hangs_while_it_imports_its_actor_is_replaced(head: ClusterNode, tmp_path: Path) -> None:
    head.wait_ready()
    assert (tmp_path / "hung").exists()
    assert head.end(signal.SIGTERM) == 0
