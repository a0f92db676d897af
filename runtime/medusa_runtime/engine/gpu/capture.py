"""Captures CUDA graphs with torch, on one stream and in one memory pool, without disturbing other threads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .graph_pool import GraphPool


class CudaGraph:
    """A graph that torch has captured. ``captured`` is torch's object."""

    def __init__(self, captured: torch.cuda.CUDAGraph) -> None:
        self.captured = captured

    def replay(self) -> None:
        self.captured.replay()


class CudaCapturer:
    """Captures graphs that share one stream and one memory pool.

    ``memory``: the pool; by default torch's own, whose addresses differ from process to process. ``keep_graph`` keeps
    the graphs' nodes readable, and ``instantiate`` makes such graphs ready to replay as well.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        memory: GraphPool | None = None,
        keep_graph: bool = False,
        instantiate: bool = True,
    ) -> None:
        self.device = device
        self.memory = memory
        self.pool = torch.cuda.graph_pool_handle() if memory is None else memory.id
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._keep_graph = keep_graph
        self._instantiate = instantiate

    def warm_up(self, work: Callable[[], None]) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        # cuBLAS gets its workspace for this stream now, and keeps it.
        with torch.cuda.stream(self.stream), self.memory.in_use() if self.memory is not None else nullcontext():
            work()
        self.stream.synchronize()

    def capture(self, work: Callable[[], None]) -> CudaGraph:
        captured = torch.cuda.CUDAGraph(keep_graph=True) if self._keep_graph else torch.cuda.CUDAGraph()
        # torch.cuda.graph is not used, because it collects garbage and empties the allocator's cache each time.
        with torch.cuda.stream(self.stream):
            # thread_local, because the loader's thread copies and allocates at the same time.
            captured.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                captured.capture_end()
        if self._keep_graph and self._instantiate:
            captured.instantiate()
        return CudaGraph(captured)
