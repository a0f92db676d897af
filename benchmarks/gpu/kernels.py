"""The compiled kernels on a machine that is lent, where nothing of ours is installed."""

from __future__ import annotations

import runpy
from pathlib import Path

BUILD = Path(__file__).parents[2] / "runtime/medusa_runtime/kernels/build.py"


def build_kernels(build: Path = BUILD) -> None:
    """Compile the kernels if they are missing or older than their sources.

    A library that was brought along is used as it is where there is no compiler: copying may have changed its time, and
    a library of other sources says so itself. Raises KernelBuildError if there is neither.
    """
    found = runpy.run_path(str(build))  # by its path, as the package would import torch
    if found["is_fresh"]():
        return
    try:
        found["build"]()
    except found["KernelBuildError"]:
        if not (found["LIBRARY_DIR"] / found["LIBRARY_NAME"]).exists():
            raise
