"""What happens where torch or Python lacks the private names that are used: a slower way, and the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from medusa_runtime.engine.gpu import placed_memory
from medusa_runtime.errors import DeviceError, WeightsError
from medusa_runtime.load import aliasing, pending, skeleton
from medusa_runtime.load.gate import Gate
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("ones", torch.ones(4))
        self.kept = torch.full((2,), 7.0)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda module, name, value=None: monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize(("module", "name"), [(skeleton, "_COUNTS_EXACTLY"), (aliasing, "_count")])
def test_a_skeleton_has_its_values_without_exact_counts(without: Any, module: Any, name: str) -> None:
    without(module, name)
    with skeleton.skeleton() as mode:
        model = Model()
    assert model.linear.weight.is_meta
    assert model.ones.tolist() == [1, 1, 1, 1]
    assert model.kept.tolist() == [7, 7]
    assert mode.keeps_views  # in doubt


def test_with_exact_counts_only_what_is_kept_is_made() -> None:
    with skeleton.skeleton() as mode:
        model = Model()
    assert model.linear.weight.is_meta
    assert not mode.keeps_views


def test_all_memory_counts_as_shared_where_it_cannot_be_counted(without: Any) -> None:
    tensors = [torch.zeros(2), torch.zeros(3, device="meta"), torch.zeros(4)]
    view = tensors[2][:1]
    assert aliasing.aliased(tensors) == {id(tensors[2])}
    without(aliasing, "_count")
    assert aliasing.aliased(tensors) == {id(tensors[0]), id(tensors[2])}
    assert view.numel() == 1


@pytest.mark.parametrize("swaps", [True, False])
def test_a_value_arrives_with_and_without_swapping(without: Any, swaps: bool) -> None:
    if not swaps:
        without(pending, "_swap")
    parameter = nn.Parameter(torch.empty(2, device="meta"), requires_grad=False)
    gate = Gate("one", nn.Identity(), [], None, hooked=False)
    pending.make_pending(parameter, gate, torch.float32, torch.device("cpu"))
    value = torch.tensor([3.0, 4.0])
    placed = pending.resolve(parameter, nn.Parameter(value, requires_grad=False))
    gate.open()
    assert placed.tolist() == [3, 4]
    assert type(placed) is nn.Parameter
    assert (parameter + 1).tolist() == [4, 5]  # also through a reference that was kept
    assert (placed is parameter) is swaps


def test_tracing_is_seen_without_the_private_state(without: Any) -> None:
    without(pending, "_tracing_state")
    seen: list[type[Exception]] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        try:
            pending.refuse_tracing()
        except WeightsError as error:
            seen.append(type(error))
        return x + 1

    pending.refuse_tracing()
    torch.jit.trace(traced, torch.ones(1))
    assert WeightsError in seen


def test_placed_memory_says_what_torch_lacks(without: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_construct_storage_from_data_pointer", raising=False)
    with pytest.raises(DeviceError, match=r"install torch 2\.13"):
        placed_memory.tensor_at(0, 1, torch.device("cpu"))
