"""Scripts that begin with a lean import of torch, which is done once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fork_server import ForkServer


@pytest.fixture(scope="module")
def run_lean() -> Iterator[Callable[..., str]]:
    """Run a script with the name ``torch`` of a lean import, in a forked process; return what it printed."""
    server = ForkServer("medusa_runtime.imports.lazy_torch:import_torch", folders=[Path(__file__).parent])

    def run(script: str, *arguments: str) -> str:
        done = server.run("script:execute", ["import torch\n" + script, *arguments])
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield run
    server.close()
