"""Tensors that are views of a region, without a copy."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from medusa_runtime.checkpoint.gguf.blocks import BLOCKS
from medusa_runtime.checkpoint.index import TensorEntry
from medusa_runtime.errors import WeightsError
from medusa_runtime.region.pages import address_of
from medusa_runtime.region.reader import Region

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip


class Views:
    """Makes tensors that are views of a region. Their memory is read-only: writing to one ends the process.

    A view keeps its mapping alive, even after the region is closed.
    """

    def __init__(self, region: Region) -> None:
        self._region = region
        self._shards: dict[int, Any] = {}

    def tensor(self, name: str, entry: TensorEntry) -> Tensor:
        """Return the tensor of an index entry: a view, or a copy where its bytes are not aligned to its element size.

        Of a tensor in blocks (``BLOCKS``) these are the bytes: uint8 [..., bytes of a row]. Raises WeightsError for a
        dtype that torch does not have.
        """
        if entry.dtype in BLOCKS:
            values, size_bytes = BLOCKS[entry.dtype]
            shape = (*entry.shape[:-1], entry.shape[-1] // values * size_bytes)
            return self.tensor(name, entry._replace(dtype="U8", shape=shape))
        if entry.dtype not in DTYPES:
            raise WeightsError(f"tensor {name} has dtype {entry.dtype}; expected one of {', '.join(DTYPES)}")
        dtype = DTYPES[entry.dtype]
        shard = self._shards.get(entry.shard)
        if shard is None:
            shard = self._shards[entry.shard] = _array(self._region.shard(entry.shard))
        if entry.start == entry.stop:
            return torch.empty(entry.shape, dtype=dtype)
        # Each has a storage of its own: torch.save writes a tensor's whole storage, which must not be the shard.
        data = torch.frombuffer(shard, dtype=torch.uint8, count=entry.stop - entry.start, offset=entry.start)
        if data.data_ptr() % dtype.itemsize:
            data = data.clone()
        if entry.strides is not None:
            return data.view(dtype).as_strided(entry.shape, entry.strides)
        return data.view(dtype).view(entry.shape)


def bytes_tensor(memory: memoryview) -> Tensor:
    """Return read-only memory as a tensor, uint8 [bytes], without a copy."""
    return torch.frombuffer(_array(memory), dtype=torch.uint8) if memory.nbytes else torch.empty(0, dtype=torch.uint8)


def _array(memory: memoryview) -> Any:
    """Return the same memory as a ctypes array, which claims to be writable.

    torch.frombuffer warns about read-only memory, and a warning can only be silenced for all threads at once. The array
    keeps the memoryview alive, and the tensor keeps the array alive.
    """
    if not memory.nbytes:
        return b""
    address = address_of(memory)

    class Shard(ctypes.c_uint8 * memory.nbytes):  # type: ignore[misc]
        pass

    array = Shard.from_address(address)
    array.memory = memory
    return array
