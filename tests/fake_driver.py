"""The fake CUDA driver of tests/runtime/state/graphs/fakecuda, as a fixture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A stale word on the stack that holds an address of the heap must not pin a graph. Where the interpreter is not
# position-independent, as Debian's, its heap lies among small numbers, and such a word cannot be told from a number.
_ET_EXEC = 2
with open(os.path.realpath(sys.executable), "rb") as _elf:
    _IS_PIE = int.from_bytes(_elf.read(18)[16:], sys.byteorder) != _ET_EXEC
needs_pie = pytest.mark.skipif(
    not _IS_PIE, reason="needs a position-independent Python; under others graphs are pinned"
)

SOURCES = Path(__file__).parent / "runtime/state/graphs/fakecuda"


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver's library, compiled once."""
    library = tmp_path_factory.mktemp("fakecuda") / "libcuda.so.1"
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), *map(str, sorted(SOURCES.glob("*.c"))), "-lm"]
    subprocess.run(command, check=True, timeout=120)
    return library
