"""Which kernels a GPU gets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from medusa_runtime.kernels.cuda import triton_obstacle


def test_triton_is_looked_for_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton.py").write_text("raise AssertionError('this takes a tenth of a second')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert triton_obstacle.__wrapped__() is None
    assert "triton" not in sys.modules


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert triton_obstacle.__wrapped__() == "triton is not installed"
