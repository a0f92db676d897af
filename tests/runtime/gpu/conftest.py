"""A real GPU, or a reason to skip."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def cuda() -> object:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: run benchmarks/gpu/run.py where there is one")
    return torch.device("cuda", 0)
