"""What a peer may send to the compiled code for chunks, which AddressSanitizer and UBSan watch meanwhile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from medusa_runtime import storage

SOURCE = Path(storage.__file__).parents[1] / "kernels" / "chunks.c"


def _runtime() -> str | None:
    """The library that has to be loaded before all others."""
    if not shutil.which("gcc"):
        return None
    found = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    return path if os.path.isabs(path := found.stdout.strip()) else None


def test_whatever_a_peer_sends_stays_within_its_chunks(tmp_path: Path) -> None:
    preload = _runtime()
    if preload is None:
        pytest.skip("needs gcc with AddressSanitizer")
    library = tmp_path / "chunks.so"
    watched = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"]
    subprocess.run(["gcc", "-std=c11", "-shared", "-fPIC", *watched, "-o", library, SOURCE], check=True)
    options = "detect_leaks=0:quarantine_size_mb=8"  # Python's own objects would be leaks
    environment = {**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": options, "PYTHONMALLOC": "malloc"}
    command = [sys.executable, Path(__file__).with_name("fuzz_chunks.py"), library]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
