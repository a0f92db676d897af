"""Which kernels a GPU gets."""

from __future__ import annotations

import sys
from pathlib import Path

import medusa_runtime.kernels
import pytest
import torch
from medusa_runtime.errors import DeviceError
from medusa_runtime.kernels.cuda import triton_obstacle, write_decode_kv


def test_triton_is_looked_for_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton.py").write_text("raise AssertionError('this takes a tenth of a second')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert triton_obstacle.__wrapped__() is None
    assert "triton" not in sys.modules


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert triton_obstacle.__wrapped__() == "triton is not installed"


def test_a_triton_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('no libtriton')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("triton", "triton.language", "medusa_runtime.kernels.paged_triton"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(medusa_runtime.kernels, "paged_triton", raising=False)
    triton_obstacle.cache_clear()
    try:
        with pytest.raises(DeviceError, match=r"cannot be imported: no libtriton; reinstall it"):
            write_decode_kv(*[torch.zeros(1)] * 5)
    finally:
        triton_obstacle.cache_clear()
