"""Writing a checkpoint as one safetensors file that loads faster than the original.

The file has one header instead of a zip's directory, a pickle and its records. Its tensors are in execution order, so
that a fetch reads the file from front to back, and at multiples of 64 bytes, so that they are used in place
(``alignment.py``).
"""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path

from medusa_runtime.checkpoint.header import PREFIX_BYTES
from medusa_runtime.checkpoint.index import WeightIndex
from medusa_runtime.load.alignment import ALLOCATED_BYTES
from medusa_runtime.load.views import Views
from medusa_runtime.region.reader import Region


def write_safetensors(region: Region, path: Path) -> None:
    """Write all tensors of a region to ``path``, which appears when it is complete. Wait for those not fetched yet.

    Raises OSError, and the error with which the fetch failed.
    """
    index = region.wait_index()
    views = Views(region)
    sizes: dict[str, int] = {}
    for name in index.order:
        region.wait_tensor(name)
        tensor = views.tensor(name, index.tensors[name])
        sizes[name] = tensor.numel() * tensor.element_size()
    # The format allows no gaps between tensors. Tensors of odd sizes would shift all that follow, so they go first, and
    # the header is padded so that all the others are aligned.
    odd = [name for name in index.order if sizes[name] % ALLOCATED_BYTES]
    names = [*odd, *(name for name in index.order if not sizes[name] % ALLOCATED_BYTES)]
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        entry = index.tensors[name]
        head[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [at, at + sizes[name]],
        }
        at += sizes[name]
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-(PREFIX_BYTES + len(text) + sum(sizes[name] for name in odd)) % ALLOCATED_BYTES)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("xb") as file:
            file.write(len(text).to_bytes(PREFIX_BYTES, "little") + text)
            for name in names:
                file.write(_bytes(region, views, name))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def is_converted(index: WeightIndex) -> bool:
    """Return whether a checkpoint is one safetensors file with aligned tensors, as ``write_safetensors`` makes it."""
    (shard, *others) = index.shards
    if others or not shard.name.endswith(".safetensors"):
        return False
    whole = [
        entry
        for entry in index.tensors.values()
        if entry.stop > entry.start and not (entry.stop - entry.start) % ALLOCATED_BYTES
    ]
    return all((shard.data_start + entry.start) % ALLOCATED_BYTES == 0 for entry in whole)


def _bytes(region: Region, views: Views, name: str) -> memoryview | bytes:
    entry = region.wait_index().tensors[name]
    if entry.strides is None:
        return region.shard(entry.shard)[entry.start : entry.stop]
    tensor = views.tensor(name, entry).contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
