"""Captures graphs with torch: on one stream, in one memory pool, without disturbing other threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class CudaGraph:
    """A graph that torch captured. ``captured`` is torch's object."""

    def __init__(self, captured: torch.cuda.CUDAGraph) -> None:
        self.captured = captured

    def replay(self) -> None:
        self.captured.replay()


class CudaCapturer:
    """Captures graphs. ``keep_graph`` keeps their nodes readable; ``instantiate`` makes such graphs ready to replay."""

    def __init__(
        self, device: torch.device, *, pool: Any = None, keep_graph: bool = False, instantiate: bool = True
    ) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._keep_graph = keep_graph
        self._instantiate = instantiate

    def warm_up(self, work: Callable[[], None]) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            work()
        self.stream.synchronize()

    def capture(self, work: Callable[[], None]) -> CudaGraph:
        captured = torch.cuda.CUDAGraph(keep_graph=True) if self._keep_graph else torch.cuda.CUDAGraph()
        # Not torch.cuda.graph, which collects garbage and empties the allocator's cache each time.
        with torch.cuda.stream(self.stream):
            # thread_local, because the loader copies and allocates in its own thread meanwhile.
            captured.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                captured.capture_end()
        if self._keep_graph and self._instantiate:
            captured.instantiate()
        return CudaGraph(captured)
