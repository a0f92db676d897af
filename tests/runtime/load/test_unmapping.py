"""What is copied out of a region does not stay in the process a second time."""

from __future__ import annotations

from pathlib import Path

import torch
from fetching import fetch_into
from medusa_runtime.load.factory.build import build
from medusa_runtime.load.factory.options import BuildOptions
from medusa_runtime.region.reader import Region
from safetensors.torch import save_file
from torch import nn


def test_what_is_copied_is_no_longer_mapped(tmp_path: Path) -> None:
    """Else it takes its memory twice; what there is a view of stays, since it may have been written to."""
    save_file({"weight": torch.ones(512, 1024), "bias": torch.ones(512)}, tmp_path / "model.safetensors")
    region = Region.create()
    try:
        fetch_into(region, str(tmp_path))
        for copy, stays in ((True, False), (False, True), (True, True)):
            module, loader = build(region, lambda: nn.Linear(1024, 512), BuildOptions(copy=copy))
            with loader:
                loader.wait()
            assert module.state_dict()["weight"].sum() == 512 * 1024
            assert (mapped_bytes(tmp_path / "model.safetensors") >= 2 << 20) is stays
    finally:
        region.close()


def mapped_bytes(path: Path) -> int:
    """Return how much of a file is in this process's memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and key == "Rss:":
            found += int(values[0]) * 1024
    return found
