"""Pairs of instances, of which one has all layers and another one loads layer after layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from group_fixtures import Group
from medusa_runtime.region.reader import Region
from region_fixtures import Filling
from waiting import until


class SlowRegion:
    """The tiny checkpoint in a region into which a test lets layer after layer."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        from safetensors.torch import load_file

        tensors = {
            name: tensor.to(torch.float32) for name, tensor in load_file(checkpoint / "model.safetensors").items()
        }
        self.filling = Filling(tensors)
        files = {path.name: path.read_bytes() for path in checkpoint.glob("*.json")}
        self.filling.writer.lay_out(self.filling.index, files)
        self.names = list(tensors)

    @property
    def region(self) -> Region:
        return self.filling.region

    def arrive(self, part: str) -> None:
        self.filling.arrive(*(name for name in self.names if part in name))

    def finish(self) -> None:
        self.filling.writer.finish()


@pytest.fixture
def slow(checkpoint: Path) -> Iterator[SlowRegion]:
    made = SlowRegion(checkpoint)
    yield made
    made.filling.close()


@pytest.fixture
def pair(slow: SlowRegion, group: Callable[..., Group], checkpoint: Path) -> Iterator[Callable[..., Group]]:
    """Make instances, of which the last one loads from the slow region."""
    with ExitStack() as stack:

        def make(*, mode: str = "live", instances: int = 2, relieves: bool = False, **plan: Any) -> Group:
            made = group(*["0:4"] * instances, **plan)
            for rank in range(instances - 1):
                whole = SlowRegion(checkpoint)
                stack.callback(whole.filling.close)
                whole.arrive("")
                whole.finish()
                made.add(rank, layers=None, mode=mode, region=whole.region)
            made.add(instances - 1, layers=None, mode=mode, region=slow.region, relieves=relieves)
            until(lambda: made.leader.engine.stats()["paired"] == instances - 1)
            return made

        yield make


__all__ = ["SlowRegion", "pair", "slow"]
