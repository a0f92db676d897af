"""Run a script with one C file of ours, compiled so that AddressSanitizer and UBSan watch it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def run_watched(script: Path, source: Path, folder: Path) -> None:
    """Run ``script LIBRARY`` in a new process. It fails if the script does, or at the first wrong access."""
    preload = _first_library()
    if preload is None:
        pytest.skip("needs gcc with AddressSanitizer")
    library = folder / source.with_suffix(".so").name
    watched = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"]
    subprocess.run(["gcc", "-std=c11", "-shared", "-fPIC", *watched, "-o", library, source], check=True)
    options = "detect_leaks=0:quarantine_size_mb=8"  # Python's own objects would be leaks
    environment = {**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": options, "PYTHONMALLOC": "malloc"}
    ran = subprocess.run(
        [sys.executable, script, library], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]


def _first_library() -> str | None:
    """Return the library that has to be loaded before all others; None if there is none."""
    if not shutil.which("gcc"):
        return None
    found = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    return path if os.path.isabs(path := found.stdout.strip()) else None
