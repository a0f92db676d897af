"""CUPTI without a driver; tests/runtime/state/graphs/test_cuda_driver.py has the fake driver's."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from medusa_runtime.device.compiling import compile_library
from medusa_runtime.device.driver import LIBRARY

# Without a driver, CUDA 13.2's ends each process that calls one of its functions.
CUPTI = "#include <stdlib.h>\nint cuptiSubscribe(void) { abort(); }\n"
SCRIPT = """
from medusa_runtime.device.cupti import ModuleRecorder
with ModuleRecorder() as recorder:
    print(recorder.error)
"""


def test_without_a_driver_no_function_of_cupti_is_called(tmp_path: Path) -> None:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        pass
    else:
        pytest.skip("this machine has a CUDA driver")
    source, folder = tmp_path / "cupti.c", tmp_path / "nvidia/cu13/lib"
    source.write_text(CUPTI)
    folder.mkdir(parents=True)
    with compile_library(source) as library:
        shutil.copy(library, folder / "libcupti.so.13")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the CUDA driver cannot be loaded ("), done.stdout
