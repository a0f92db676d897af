"""Processes whose wall clock jumps while they run, as when NTP sets a machine's clock. Nothing else is changed."""

from __future__ import annotations

import mmap
import shutil
import subprocess
from pathlib import Path

import pytest


class ShiftedClock:
    """A wall clock that processes with this ``environ`` see. It goes as the machine's does until it is set."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler")
        library, shift = folder / "shifted_clock.so", folder / "shift"
        source = Path(__file__).with_suffix(".c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", library, source], check=True, timeout=240)
        shift.write_bytes(bytes(8))
        with open(shift, "r+b") as file:
            self._shift = mmap.mmap(file.fileno(), 8)
        self.environ = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(shift)}

    def set(self, seconds: int) -> None:
        """Set the clock so many seconds after the machine's, or before it."""
        self._shift[:] = seconds.to_bytes(8, "little", signed=True)
