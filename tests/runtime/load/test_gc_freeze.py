"""The collector looks only at what a load makes, and afterwards at everything again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fetching import fetch_into
from medusa_runtime.load.factory import gc_freeze
from medusa_runtime.load.factory.build import build
from medusa_runtime.load.factory.gc_freeze import freeze, thaw
from medusa_runtime.region.reader import Region
from safetensors.torch import save_file
from torch import nn


@pytest.fixture(autouse=True)
def _as_at_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever loads other tests have left behind, and whatever the tests have frozen."""
    monkeypatch.setattr(gc_freeze, "_loads", 0)
    monkeypatch.setattr(gc_freeze, "_frozen_by_others", False)
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


def test_loads_at_the_same_time_are_counted() -> None:
    assert not gc.get_freeze_count()
    freeze()
    freeze()
    thaw()
    assert gc.get_freeze_count()
    thaw()
    assert not gc.get_freeze_count()
    thaw()


def test_what_a_user_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        freeze()
        thaw()
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_a_build_ends_it_however_it_ends(tmp_path: Path) -> None:
    def made() -> nn.Module:
        assert gc.get_freeze_count()
        return nn.Linear(3, 4)

    def broken() -> nn.Module:
        raise OSError("no such thing")

    save_file(made_state := {"weight": torch.ones(4, 3), "bias": torch.ones(4)}, tmp_path / "model.safetensors")
    region = Region.create()
    try:
        fetch_into(region, str(tmp_path))
        module, loader = build(region, made)
        with loader:
            loader.wait()
        assert torch.equal(module.state_dict()["weight"], made_state["weight"])
        assert not gc.get_freeze_count()
        with pytest.raises(OSError, match="no such thing"):
            build(region, broken)
        assert not gc.get_freeze_count()
    finally:
        region.close()
