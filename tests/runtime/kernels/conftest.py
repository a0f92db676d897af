"""Kernels compiled from the sources as they are, once for every instruction set this CPU has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from medusa_runtime.kernels import build, cpu, native


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not cpu.features() >= cpu.NEEDED:
        pytest.skip(f"the kernels need {sorted(cpu.NEEDED)}")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    installed = build.SOURCE_DIR / build.LIBRARY_NAME
    return installed if build.is_fresh() else build.build(tmp_path_factory.mktemp("kernels") / build.LIBRARY_NAME)


@pytest.fixture(params=[256, 512], ids=["avx2", "avx512"])
def compiled(request: pytest.FixtureRequest, library: Path) -> native.NativeKernels:
    if request.param == 512 and "avx512f" not in cpu.features():
        pytest.skip("this CPU has no AVX-512F")
    return native.NativeKernels(request.param, library)
