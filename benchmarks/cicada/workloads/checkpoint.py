"""A safetensors file of each workload, of its true shapes and with random weights."""

from __future__ import annotations

import os
import zlib
from contextlib import closing
from pathlib import Path

import torch
from medusa_runtime.config import Settings
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.load.alignment import must_move
from medusa_runtime.load.conversion import write_safetensors
from medusa_runtime.load.skeleton import skeleton
from medusa_runtime.load.views import Views
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline
from torch import Tensor

from benchmarks import make_checkpoint
from benchmarks.cicada.runner import CONVERTED
from benchmarks.cicada.workloads.workload import Workload

_BLOCK_ELEMENTS = 4 << 20


def checkpoint(workload: Workload, folder: Path) -> Path:
    """The workload's folder with model.safetensors in it, written unless it is there; afterwards in the page cache."""
    path = folder / workload.name / "model.safetensors"
    if not path.exists():
        beside = path.parent.with_suffix(f".{os.getpid()}")
        if workload.shape:
            make_checkpoint.write(workload.shape, beside, 1 << 40, "bf16", 0)
        else:
            _write(workload, beside)
        beside.rename(path.parent)
    with path.open("rb") as file:
        while file.read(8 << 20):
            pass
    return path.parent


def converted(folder: Path) -> Path | None:
    """The same as ``medusa materialize --convert`` writes it, where this CPU needs some tensors to lie elsewhere.

    Such tensors are copied when they are loaded as they are (see the runtime's ``alignment.py``). None: there are none.
    """
    beside = folder / CONVERTED
    with closing(Region.create()) as region:
        prefetch(region, str(folder), settings=Settings(), timeline=Timeline.create("convert"))
        index, views = region.wait_index(), Views(region)
        if not any(must_move(views.tensor(name, index.tensors[name])) for name in index.order):
            return None
        if not (beside / "model.safetensors").exists():
            beside.mkdir(exist_ok=True)
            write_safetensors(region, beside / "model.safetensors")
    return beside


def _write(workload: Workload, folder: Path) -> None:
    """Write it with safetensors, whose files hold tensors by size of element and name, not in execution order."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    with skeleton():
        model = workload.factory()
    block = torch.randn(_BLOCK_ELEMENTS, generator=torch.Generator().manual_seed(0)) * 0.02
    state = {name: _random(name, tensor, block) for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def _random(name: str, tensor: Tensor, block: Tensor) -> Tensor:
    """Random values: norms and variances near one, all else around zero, from a place that depends on the name."""
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    at = zlib.crc32(name.encode()) % len(block)
    count = -(-(at + tensor.numel()) // len(block))
    values = block.repeat(count)[at : at + tensor.numel()].clone().view(tensor.shape)
    if tensor.dim() == 1 and name.endswith(("weight", "running_var")):
        return values + 1
    return values
