"""A fake of NVIDIA's management library, built from fake_nvml.c, for the tests of what a machine says of its GPUs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def build(folder: Path) -> str:
    """Build the library into a folder, and return its path."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library, source = folder / "libnvidia-ml.so.1", Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True, timeout=240)
    return str(library)
