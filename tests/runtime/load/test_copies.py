"""The memory that a load takes for copies is known before it begins, and an error where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from medusa_runtime.config import Settings
from medusa_runtime.engine.torch.kv_size import free_bytes
from medusa_runtime.errors import TooLargeError
from medusa_runtime.load.applier import Applier
from medusa_runtime.load.copies import copied_bytes
from medusa_runtime.load.factory.applier import FactoryApplier
from medusa_runtime.load.factory.build import build
from medusa_runtime.load.factory.options import BuildOptions
from medusa_runtime.load.loader import Loader
from medusa_runtime.timeline import Timeline
from torch import Tensor, nn

Fill = Callable[..., Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(64, 32)
        self.kernel = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.exact = nn.Parameter(torch.rand(5, 16, dtype=torch.float64))


def state(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        name: tensor.detach().to(dtype) if tensor.dtype == torch.float32 else tensor.detach()
        for name, tensor in Net().state_dict().items()
    }


@pytest.mark.parametrize(
    ("stored", "shift", "options"),
    [
        (torch.float32, 0, BuildOptions()),
        (torch.float32, 8, BuildOptions()),
        (torch.float32, 32, BuildOptions()),
        (torch.float32, 8, BuildOptions(exact=False)),
        (torch.float32, 0, BuildOptions(copy=True)),
        (torch.float32, 0, BuildOptions(dtype=torch.bfloat16)),
        (torch.bfloat16, 8, BuildOptions()),
        (torch.bfloat16, 8, BuildOptions(dtype=torch.bfloat16)),
    ],
)
def test_what_is_counted_is_what_is_copied(
    filling: Fill, stored: torch.dtype, shift: int, options: BuildOptions
) -> None:
    filled = filling(state(stored), shift=shift).complete()
    module, loader = build(filled.region, lambda: Net().eval(), options)
    loader.wait()
    copied = filled.index.tensors.keys() - filled.region.viewed
    tensors = module.state_dict()
    applier = FactoryApplier(fresh := Net(), Net, options)
    counted = copied_bytes(filled.index, applier.plan(filled.index).todo, applier)
    assert counted == sum(tensors[name].nbytes for name in copied)
    assert fresh is not module


def test_casts_and_odd_addresses_of_an_engines_model_are_counted(filling: Fill) -> None:
    for stored, shift, dtype in ((torch.bfloat16, 0, torch.float32), (torch.float32, 3, None)):
        filled = filling(state(stored), shift=shift).complete()
        applier = Applier(Net(), dtype=dtype)
        counted = copied_bytes(filled.index, applier.plan(filled.index).todo, applier)
        wide = [math.prod(entry.shape) * 4 for entry in filled.index.tensors.values() if entry.dtype in ("F32", "BF16")]
        assert counted == sum(wide) + 5 * 16 * (8 if dtype is None else 4) + 8  # and the norm's counter


@pytest.mark.parametrize("shift", [0, 8])
def test_a_load_whose_copies_have_no_room_is_an_error_before_any_is_made(
    filling: Fill, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_runtime.load.copies._SMALL_BYTES", 100)
    monkeypatch.setattr("medusa_runtime.load.copies.memory_available_bytes", lambda: 5000)
    filled = filling(state(), shift=shift).complete()
    loader = Loader(filled.region, FactoryApplier(Net(), Net, BuildOptions()), timeline=Timeline.create("test"))
    if shift:
        with pytest.raises(TooLargeError, match=r"of the weights have to be copied, .* aligned tensors"):
            loader.wait()
    else:
        loader.wait()  # the buffers of the norm alone
    assert bool(filled.region.viewed) is not bool(shift)


def test_what_a_killed_process_gives_back_is_waited_for(filling: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter((0, 0, 1 << 30))
    monkeypatch.setattr("medusa_runtime.load.copies._SMALL_BYTES", 100)
    monkeypatch.setattr("medusa_runtime.load.copies.memory_available_bytes", lambda: next(free))
    timeline = Timeline.create("test")
    timeline.mark("plan")  # of the process before
    filled = filling(state(), shift=8).complete()
    Loader(filled.region, FactoryApplier(Net(), Net, BuildOptions()), timeline=timeline).wait()
    assert next(free, None) is None


def test_the_kv_cache_leaves_room_for_moved_tensors(filling: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_runtime.engine.torch.kv_size.memory_available_bytes", lambda: 1 << 30)
    free = {}
    for shift in (0, 8):
        for exact in (True, False):
            filled = filling({"weight": torch.rand(64, 64)}, shift=shift).complete()
            applier = FactoryApplier(nn.Linear(64, 64, bias=False), nn.Module, BuildOptions(exact=exact))
            free[shift, exact] = free_bytes(filled.region, filled.index, Settings(), torch.float32, applier)
    assert free[0, True] - free[0, False] == 0
    assert free[8, False] - free[8, True] == 64 * 64 * 4
