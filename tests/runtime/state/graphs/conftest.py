"""The toy decode step as processes on the fake driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer

HERE = Path(__file__).parent
Toy = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def cubins() -> Path:
    """The folder of cubins, which build.sh compiles from the .cu files beside them."""
    return HERE / "cubins"


@pytest.fixture(scope="session")
def forked_toys() -> Iterator[ForkServer]:
    server = ForkServer("toy", folders=[HERE])
    yield server
    server.close()


@pytest.fixture(scope="session")
def toy(fake_cuda: Path, cubins: Path, forked_toys: ForkServer) -> Toy:
    """Run one phase in a process of its own: ``toy("restore", {...}, base=…, **environment)``.

    Returns its answer, with what it logged as ``log``. It is forked, except that what is materialized is so in a new
    interpreter: nothing is there at the addresses of the other capture, or of those that restore it.
    """

    def run(
        phase: str,
        options: dict[str, Any],
        *,
        base: int = 0x600000000000,
        python: str | None = None,
        **environment: str,
    ) -> dict[str, Any]:
        variables = {**os.environ, "FAKE_CUDA_LIBRARY": str(fake_cuda), "TOY_CUBINS": str(cubins)}
        variables |= {"FAKE_CUDA_BASE": hex(base), "FAKE_CUDA_DESCRIBE": "1", "FAKE_CUDA_LATE": "1", **environment}
        arguments = [phase, json.dumps(options)]
        if python is not None or phase == "materialize":
            command = [python or sys.executable, str(HERE / "toy.py"), *arguments]
            done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)
        else:
            done = forked_toys.run("toy:command", arguments, environ=variables)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return {**result, "log": done.stderr}

    return run


@pytest.fixture(scope="session")
def second(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump of a capture with every range and every handle elsewhere."""
    path = tmp_path_factory.mktemp("second") / "dump"
    toy("dump", {"dump": str(path), "order": 1}, base=0x500000000000, FAKE_CUDA_HANDLES="0x540000000000")
    return path


@pytest.fixture(scope="session")
def materialized(toy: Toy, second: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The offline phase's answer, with the ``path`` of its bundle."""
    path = tmp_path_factory.mktemp("bundle") / "graphs"
    return {**toy("materialize", {"out": str(path), "second": str(second)}), "path": str(path)}
