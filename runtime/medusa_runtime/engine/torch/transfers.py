"""Copies between the host and the device that computes, for workers that send each other their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .kv_cache import KvCache

_TRANSFER_BYTES = 32 << 20


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor in the host's memory: itself on a CPU, else a copy, after the work of the current stream."""
    if tensor.device.type == "cpu":
        return tensor
    host = _pinned(tensor.shape, tensor.dtype, tensor.device)
    host.copy_(tensor, non_blocking=True)
    _streams_of(tensor.device).current_stream(tensor.device).synchronize()
    return host


class BlockCopies:
    """Copies of blocks of the KV cache, for the layers [start, stop), in any thread.

    On a GPU they are made on a stream of their own, so that the engine's steps go on beside them. Belongs to one
    thread.
    """

    def __init__(self, cache: KvCache, start: int, stop: int) -> None:
        self._pool = pool = cache.pool[start - cache.first_layer : stop - cache.first_layer]
        self.shape = (stop - start, *pool.shape[1:2], *pool.shape[3:])  # of a block
        self.dtype = pool.dtype
        self.block_bytes = pool.dtype.itemsize * torch.Size(self.shape).numel()
        on_gpu = pool.device.type != "cpu"
        self._stream: Any = _streams_of(pool.device).Stream(pool.device) if on_gpu else None
        # How many blocks to copy at once. On a CPU nothing is gained by more than one.
        self.most = max(_TRANSFER_BYTES // self.block_bytes, 1) if on_gpu else 1

    def has(self, number: int) -> bool:
        """Return whether the cache has a block of this number."""
        return 0 <= number < self._pool.shape[2]

    def read(self, numbers: Sequence[int]) -> Tensor:
        """Return a copy of blocks in the host's memory: [blocks, layers, 2, 16, kv_heads, head_dim].

        What the engine's thread has begun before is in it.
        """
        with self._beside_steps():
            blocks = torch.empty((len(numbers), *self.shape), dtype=self.dtype, device=self._pool.device)
            for place, number in enumerate(numbers):
                blocks[place] = self._pool[:, :, number]
            return on_host(blocks)

    def write(self, numbers: Sequence[int], blocks: Sequence[Tensor]) -> None:
        """Write blocks [layers, 2, 16, kv_heads, head_dim] of the host to the cache. Returns when they are there."""
        with self._beside_steps() as stream:
            if stream is not None:
                staged = torch.stack(
                    list(blocks), out=_pinned((len(blocks), *self.shape), self.dtype, self._pool.device)
                )
                blocks = list(staged.to(self._pool.device, non_blocking=True))
            for number, block in zip(numbers, blocks, strict=True):
                self._pool[:, :, number] = block
            if stream is not None:
                stream.synchronize()

    @contextmanager
    def _beside_steps(self) -> Iterator[Any]:
        """A context in which work is launched on the stream, behind what the engine's thread has launched so far."""
        if self._stream is None:
            yield None
            return
        streams = _streams_of(self._pool.device)
        self._stream.wait_stream(streams.default_stream(self._pool.device))  # the engine's
        with streams.stream(self._stream):
            yield self._stream


def _streams_of(device: torch.device) -> Any:
    """Return torch's module for the streams of a device: ``torch.cuda`` for a GPU."""
    return torch.get_device_module(device)


def _pinned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate memory of the host that a GPU can copy from and to at full speed."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")


__all__ = ["BlockCopies", "on_host"]
