"""Regions that a test fills itself, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from medusa_runtime.checkpoint.index import Shard, TensorEntry, WeightIndex
from medusa_runtime.region.reader import Region

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
}


class Filling:
    """A region for these tensors, none of them there yet; each is a shard of its own and arrives alone.

    ``shift`` puts so many bytes in front of each tensor.
    """

    def __init__(self, tensors: dict[str, Tensor], shift: int = 0) -> None:
        self._data = {name: bytes(shift) + _bytes(tensor) for name, tensor in tensors.items()}
        entries, shards, offset = {}, [], 0
        for number, (name, tensor) in enumerate(tensors.items()):
            length = len(self._data[name])
            dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
            entries[name] = TensorEntry(number, shift, length, dtype, tuple(tensor.shape))
            shards.append(Shard(f"{name}.safetensors", 64 + length, 64, "v1", None, offset))
            offset += -(-length // 4096) * 4096
        self.index = WeightIndex(shards, entries)
        self.region = Region.create()
        self.writer = self.region.writer()

    def lay_out(self) -> Filling:
        """Let readers see the index."""
        self.writer.lay_out(self.index, {})
        return self

    def arrive(self, *names: str) -> None:
        """Let these tensors arrive, in this order."""
        for name in names:
            data = memoryview(self._data[name])
            for chunk in self.writer.chunks.covering(self.index.tensors[name].shard, 0, len(data)):
                _, start, stop = self.writer.chunks.shard_range(chunk)
                with self.writer.buffer(chunk) as buffer:
                    buffer[:] = data[start:stop]
                self.writer.publish(chunk)

    def complete(self) -> Filling:
        self.lay_out().arrive(*self._data)
        self.writer.finish()
        return self

    def close(self) -> None:
        self.writer.close()
        self.region.close()


def _bytes(tensor: Tensor) -> bytes:
    import torch

    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.fixture
def filling() -> Iterator[Callable[..., Filling]]:
    made: list[Filling] = []

    def make(tensors: dict[str, Tensor], **options: Any) -> Filling:
        made.append(Filling(tensors, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
