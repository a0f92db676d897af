"""The fake CUDA driver of tests/runtime/state/graphs/fakecuda, as a fixture."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from built_once import built_once

SOURCES = Path(__file__).parents[2] / "runtime/state/graphs/fakecuda"


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver's library, compiled once."""

    def compile_all(folder: Path) -> None:
        sources = map(str, sorted(SOURCES.glob("*.c")))
        command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), *sources, "-lm"]
        subprocess.run(command, check=True, timeout=240)

    return built_once(tmp_path_factory, "fakecuda", compile_all) / "libcuda.so.1"
