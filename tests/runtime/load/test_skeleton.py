"""Construction without memory: of plain modules, of odd ones, and of nothing outside the context or the thread."""

from __future__ import annotations

import resource
import threading

import pytest
import torch
from medusa_runtime.load.skeleton import skeleton
from torch import Tensor, nn
from torch.nn.init import trunc_normal_  # bound early, as some model code does


class Odd(nn.Module):
    """The ways in which model code makes parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Parameter(torch.randn(6, 4))
        self.full = nn.Parameter(torch.full((3,), 0.5))
        self.legacy = nn.Parameter(torch.Tensor(4, 4))
        self.on = nn.Parameter(torch.zeros(2, 3, dtype=torch.float16, device="cpu"), requires_grad=False)
        trunc_normal_(self.made, std=0.02)
        nn.init.orthogonal_(self.legacy)
        nn.init.xavier_normal_(self.legacy)
        nn.init.eye_(self.legacy)
        nn.init.sparse_(self.made, 0.5)
        with torch.no_grad():
            self.made.mul_(2)[0] = 1
            self.legacy.copy_(torch.ones(4, 4))
        self.made.data.normal_()
        table = torch.zeros(5, 4)
        table[:, 0::2] = torch.arange(5.0).unsqueeze(1)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("pair", torch.stack([torch.ones(2), torch.full((2,), 3)]))
        empty = torch.empty(2)
        empty.fill_(7)
        self.attribute = empty
        self.constant = torch.zeros(2, 2).add(1).sum().item()
        self.parts = nn.ModuleList([nn.LSTM(4, 5, 2), nn.MultiheadAttention(8, 2), nn.Conv2d(3, 4, 3)])
        self.norm = nn.BatchNorm1d(5)
        self.embed = nn.Embedding(5, 6, padding_idx=1)


def test_parameters_take_no_memory_and_buffers_are_right() -> None:
    with skeleton():
        module = Odd()
    real = Odd()
    for name, parameter in module.named_parameters():
        like = real.get_parameter(name)
        assert parameter.is_meta, name
        assert (type(parameter), parameter.shape, parameter.dtype) == (type(like), like.shape, like.dtype), name
        assert parameter.requires_grad == like.requires_grad, name
    assert len(list(module.parameters())) == len(list(real.parameters()))
    for name, buffer in real.named_buffers():
        torch.testing.assert_close(module.get_buffer(name), buffer, rtol=0, atol=0)
    assert torch.equal(module.attribute, torch.full((2,), 7.0))
    assert module.constant == 4


def test_a_large_model_needs_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with skeleton():
        layers = nn.ModuleList(nn.TransformerEncoderLayer(8192, 64, 32768, batch_first=True) for _ in range(8))
        table = nn.Parameter(torch.rand(200_000, 8192))
    assert sum(parameter.numel() for parameter in layers.parameters()) > 6e9
    assert table.is_meta
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB; the parameters would be 30 GB


def test_tied_parameters_stay_tied() -> None:
    with skeleton():
        one, two = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        two.weight = one.weight
    assert one.weight is two.weight


def test_other_threads_are_left_alone() -> None:
    found: list[Tensor] = []

    def build() -> None:
        found.append(nn.Linear(3, 3).weight)

    with skeleton():
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
        assert nn.Linear(3, 3).weight.is_meta
    assert not found[0].is_meta


def test_a_branch_on_a_parameter_s_value_is_no_silent_false() -> None:
    with skeleton():
        total = nn.Linear(2, 2).weight.square().sum()
        with pytest.raises(RuntimeError, match="meta"):
            bool(total >= 0)


def test_is_restored_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), skeleton():
        raise ZeroDivisionError
    linear = nn.Linear(3, 3)
    assert not linear.weight.is_meta
    assert linear(torch.zeros(2, 3)).shape == (2, 3)
