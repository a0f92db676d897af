"""Which kernels a GPU gets."""

from __future__ import annotations

import sys
from pathlib import Path

import medusa_runtime.kernels
import pytest
import torch
from medusa_runtime.kernels import cuda
from medusa_runtime.kernels.cuda import paged_decode, triton_obstacle, write_decode_kv


def test_triton_is_looked_for_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton.py").write_text("raise AssertionError('this takes a tenth of a second')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert triton_obstacle.__wrapped__() is None
    assert "triton" not in sys.modules


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert triton_obstacle.__wrapped__() == "triton is not installed"


def test_a_triton_that_cannot_be_imported_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is only looked for at the start, so this shows in a step, which is computed all the same."""
    (tmp_path / "triton.py").write_text("raise ImportError('no libtriton')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("triton", "triton.language", "medusa_runtime.kernels.paged_triton"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(medusa_runtime.kernels, "paged_triton", raising=False)
    for cached in (triton_obstacle, cuda._imported):
        cached.cache_clear()
    keys, values, k, v = torch.zeros(32, 2, 4), torch.zeros(32, 2, 4), torch.randn(1, 2, 4), torch.randn(1, 2, 4)
    try:
        for _ in range(2):
            write_decode_kv(keys, values, torch.tensor([16]), k, v)
        blocks = [part.view(2, 16, 2, 4) for part in (keys, values)]
        contexts, tables = torch.tensor([1]), torch.tensor([[1]], dtype=torch.int32)
        found = paged_decode(torch.randn(1, 4, 4), *blocks, tables, contexts, scale=0.5, window=None)
    finally:
        for cached in (triton_obstacle, cuda._imported):
            cached.cache_clear()
    assert torch.allclose(found, v.repeat_interleave(2, 1)), "one token sees itself"
    assert caplog.text.count("triton cannot be imported (no libtriton); reinstall it") == 1
