"""Measures, offline, the GPU memory that a forward takes, and makes a KV plan of it (MEDUSA §6).

This runs in the process that captures the graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...config import Settings
from ...models import DecoderModel
from ...state.kv_plan import KvPlan, logits_bytes, plan_to_record
from ..torch.kv_cache import BLOCK_TOKENS, KvCache
from ..torch.kv_size import geometry
from ..torch.profile import prefill_step
from ..torch.runner import run_step
from .attention import GpuAttention


class DeviceMemory(Protocol):
    """The memory of one device, as torch and the driver report it."""

    def free(self) -> int:
        """Return the bytes that the driver has free. Memory that torch's allocator caches counts as taken."""

    def peak(self, work: Callable[[], object]) -> int:
        """Run ``work``, and return the most bytes that it took from the driver in addition to those taken before."""


class CudaMemory:
    """The memory of torch's current device."""

    def free(self) -> int:
        import torch

        torch.cuda.synchronize()
        return int(torch.cuda.mem_get_info()[0])

    def peak(self, work: Callable[[], object]) -> int:
        import torch

        torch.cuda.empty_cache()
        before = self.free()
        torch.cuda.reset_peak_memory_stats()
        reserved = torch.cuda.memory_reserved()
        work()
        torch.cuda.synchronize()
        # Libraries' workspaces are not allocated by torch, so the driver's free memory may have shrunk by more.
        lost = before - int(torch.cuda.mem_get_info()[0])
        return max(torch.cuda.max_memory_reserved() - reserved, lost, 0)


def measure_forward_bytes(memory: DeviceMemory, model: DecoderModel, cache: KvCache, settings: Settings) -> int:
    """Return the bytes that a forward of ``max_batched_tokens`` takes beside weights and cache.

    It runs a forward, which overwrites the cache.
    """
    room = (cache.blocks.blocks - 1) * BLOCK_TOKENS
    tokens = max(min(settings.max_batched_tokens, model.config.max_positions, room), 1)
    taken = memory.peak(lambda: run_step(model, cache, prefill_step(tokens), GpuAttention))
    steps = -(-settings.max_batched_tokens // tokens)
    return taken * steps + logits_bytes(settings, model.config.vocab_size)


def measure_kv_plan(
    memory: DeviceMemory, model: DecoderModel, cache: KvCache, settings: Settings, *, graph_bytes: int
) -> KvPlan:
    """Make the KV plan for starts on this type of GPU. ``graph_bytes``: what the graphs took when captured."""
    shape = geometry(cache.shape, model.config.max_positions)
    taken = measure_forward_bytes(memory, model, cache, settings)
    return plan_to_record(shape, settings, activation_bytes=taken, graph_bytes=max(graph_bytes, 0))


__all__ = ["CudaMemory", "DeviceMemory", "measure_forward_bytes", "measure_kv_plan"]
