"""Any module filled from a checkpoint the way an instance fills it: prefetcher, region, skeleton, loader."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fetching import fetch_into
from medusa_runtime.load.applier import Applier
from medusa_runtime.load.loader import Loader
from medusa_runtime.load.skeleton import skeleton
from medusa_runtime.region.reader import Region
from torch import nn

Filled = Callable[[Path, Callable[[], nn.Module]], nn.Module]


@pytest.fixture
def filled() -> Iterator[Filled]:
    """``filled(folder, factory)``: what the factory makes, in evaluation mode, with the folder's weights."""
    with contextlib.ExitStack() as stack:

        def fill(folder: Path, factory: Callable[[], nn.Module]) -> nn.Module:
            region = Region.create()
            stack.callback(region.close)
            fetch_into(region, str(folder))
            with skeleton():
                module = factory().eval()
            assert all(parameter.is_meta for parameter in module.parameters())
            with Loader(region, Applier(module)) as loader:
                loader.wait()
            return module

        with torch.inference_mode():
            yield fill
