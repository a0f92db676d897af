"""Kernels compiled from the sources as they are, once for every instruction set this CPU has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from built_once import built_once
from medusa_runtime import kernels
from medusa_runtime.kernels import build, cpu, native, quantized
from medusa_runtime.load.quantized import block_codes


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not cpu.features() >= cpu.NEEDED:
        pytest.skip(f"the kernels need {sorted(cpu.NEEDED)}")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    if build.is_fresh():
        return build.LIBRARY_DIR / build.LIBRARY_NAME
    folder = built_once(tmp_path_factory, "kernels", lambda folder: build.build(folder / build.LIBRARY_NAME))
    return folder / build.LIBRARY_NAME


BITS = {"avx2": 256, "avx512f": 512, "avx512_bf16": 512, "asimd": 128, "bf16": 128}


@pytest.fixture(params=BITS)
def compiled(request: pytest.FixtureRequest, library: Path) -> native.NativeKernels:
    needed = cpu.AVX512_DOTS if request.param == "avx512_bf16" else {request.param}
    if not cpu.features() >= needed:
        pytest.skip(f"this CPU has no {request.param}")
    return native.NativeKernels(BITS[request.param], library, bf16_dots=request.param in cpu.DOTS)


@pytest.fixture
def used(compiled: native.NativeKernels, monkeypatch: pytest.MonkeyPatch) -> native.NativeKernels:
    """The kernels of one instruction set, for all of this process."""
    for module in (block_codes, kernels, quantized):
        monkeypatch.setattr(module, "native_kernels", lambda: compiled)
    return compiled
