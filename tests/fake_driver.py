"""The fake CUDA driver of tests/runtime/state/graphs/fakecuda, as a fixture."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent / "runtime/state/graphs/fakecuda"


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver's library, compiled once."""
    library = tmp_path_factory.mktemp("fakecuda") / "libcuda.so.1"
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), *map(str, sorted(SOURCES.glob("*.c"))), "-lm"]
    subprocess.run(command, check=True, timeout=240)
    return library
