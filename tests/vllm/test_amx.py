"""Tile registers on CPUs with AMX: without permission vLLM's bf16 attention ends the engine by SIGILL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

# ARCH_GET_XCOMP_PERM of arch_prctl(2), whose bit 18 is XTILEDATA; asked in a fork, as an engine is one of the zygote.
_PERMITTED = """
import ctypes, os
from medusa_runtime.config import Settings
from medusa_vllm.imports import preimport
preimport(Settings(engine="vllm", device="cpu"))
if os.fork() == 0:
    features = ctypes.c_ulong(0)
    ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(features))
    print(features.value >> 18 & 1, flush=True)
    os._exit(0)
os.wait()
"""


def test_an_engine_may_use_the_tiles_that_its_cpu_has() -> None:
    flags = Path("/proc/cpuinfo").read_text()
    done = subprocess.run([sys.executable, "-c", _PERMITTED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(int(" amx_tile" in flags))
