"""torch.save's file, written again as safetensors: the same tensors, read by safetensors itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fetching import fetch_into
from medusa_runtime.checkpoint.reader import open_checkpoint
from medusa_runtime.errors import CorruptError
from medusa_runtime.load.conversion import is_converted, write_safetensors
from medusa_runtime.load.factory.build import build
from medusa_runtime.load.factory.options import BuildOptions
from medusa_runtime.region.reader import Region
from safetensors.torch import load_file, save_file
from torch import nn


def make() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10), nn.Linear(10, 64)
    ).eval()


def test_the_same_tensors_aligned_and_in_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = make()
    last_first = reversed(net.state_dict().items())
    state = {f"layers.{name}": tensor for name, tensor in last_first}
    state |= {"turned": torch.randn(8, 40).t(), "empty": torch.empty(0, 3)}
    torch.save(state, tmp_path / "model.pt")
    region = Region.create()
    try:
        fetch_into(region, str(tmp_path / "model.pt"))
        write_safetensors(region, tmp_path / "model.safetensors")
        order = region.wait_index().order
    finally:
        region.close()
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == set(state)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    index = open_checkpoint(str(tmp_path)).index
    (shard,) = index.shards
    places = {name: shard.data_start + entry.start for name, entry in index.tensors.items()}
    whole = [name for name, tensor in state.items() if tensor.nbytes % 64 == 0 and tensor.nbytes]
    assert all(places[name] % 64 == 0 for name in whole)
    assert whole[0].startswith("layers.4.")
    assert sorted(whole, key=places.__getitem__) == sorted(whole, key=order.index)
    assert order[0].startswith("layers.0.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "model.safetensors"]


def test_is_used_in_place(tmp_path: Path) -> None:
    net = make()
    torch.save(net.state_dict(), tmp_path / "model.pt")
    regions = [Region.create(), Region.create()]
    try:
        for region, name in zip(regions, ("model.pt", "model.safetensors"), strict=True):
            fetch_into(region, str(tmp_path / name))
            if name == "model.pt":
                write_safetensors(region, tmp_path / "model.safetensors")
        module: Any
        module, loader = build(regions[1], make, BuildOptions(release=True))
        loader.wait()
        x = torch.rand(1, 3, 8, 8)
        assert torch.equal(module(x), net(x))
        assert module[3].weight.data_ptr() % 64 == 0
    finally:
        for region in regions:
            region.close()


def test_a_fetch_that_fails_leaves_no_file(filling: Callable[..., Any], tmp_path: Path) -> None:
    filled = filling({"a": torch.zeros(9), "b": torch.zeros(9)}).lay_out()
    filled.arrive("a")
    filled.writer.fail(CorruptError("bytes 5 to 9"))
    with pytest.raises(CorruptError, match="bytes 5 to 9"):
        write_safetensors(filled.region, tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_unaligned_safetensors_are_put_into_place(tmp_path: Path) -> None:
    state = {"count": torch.ones((), dtype=torch.int64), "weight": torch.randn(64, 32), "other": torch.randn(16)}
    save_file(state, tmp_path / "model.safetensors")  # the eight bytes of the count come first
    assert not is_converted(open_checkpoint(str(tmp_path)).index)
    (tmp_path / "new").mkdir()
    region = Region.create()
    try:
        fetch_into(region, str(tmp_path))
        write_safetensors(region, tmp_path / "new" / "model.safetensors")
    finally:
        region.close()
    assert is_converted(open_checkpoint(str(tmp_path / "new")).index)
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
