"""Decode steps as CUDA graphs, one for each of a few batch sizes (MEDUSA §2.2; vLLM's 35 default sizes).

A batch runs in the smallest graph that is large enough, or eagerly if there is none. A graph contains the addresses of
the weights, the KV cache and the static inputs, which are all known before the weights' bytes arrive. So graphs can be
captured while weights are still loading, and whenever the engine is idle. Without idle time, a step gets the graph
that it needs.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ...load.gate import bypass_gates
from ...models import DecoderModel
from ...timeline import Timeline
from ..serving.sequence import Span
from ..torch.kv_cache import KvCache, Memory, blocks_for
from .attention import DecodeAttention
from .static_inputs import StaticInputs

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 2, 4, *range(8, 257, 8))
_FIRST_SIZES = (1, 2, 4, 8)  # restored first, together with the largest size, which fits every batch


class Graph(Protocol):
    """A captured or restored graph."""

    def replay(self) -> None:
        """Launch the graph on the current stream, behind earlier work."""


class Capturer(Protocol):
    """Captures graphs on a device. In tests a graph is a recorded callable."""

    def warm_up(self, work: Callable[[], None]) -> None:
        """Run ``work`` outside of a capture, so that kernels are loaded and workspaces exist."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what ``work`` launches. All captures share one stream and one memory pool."""


class Restorer(Protocol):
    """Restores a state bundle's graphs, in the engine's thread."""

    def begin(self, data: bytes | memoryview) -> Sequence[int]:
        """Map the graphs' memory, and return the sizes that the bundle has. Raises StateError for a damaged bundle."""

    def build(self, sizes: Sequence[int]) -> None:
        """Do what needs no weights: load kernels, relocate, build the graphs of these sizes."""

    def build_one(self, sizes: Sequence[int]) -> int:
        """Build one of these graphs, if possible one whose kernels are loaded, and return its size."""

    def restore_sizes(self, sizes: Sequence[int], *, validate: str = "all") -> Mapping[int, Graph]:
        """Return the graphs that fit, of these sizes. ``validate`` says which of them are checked by a replay.

        The weights must be loaded.
        """

    def close(self) -> None:
        """Free what restoring has taken. No graph of it may be in use."""


def sizes_for(max_concurrency: int) -> tuple[int, ...]:
    """Return the batch sizes to capture for up to ``max_concurrency`` sequences; the last size fits them all.

    Above 256 sequences, the last size is 256.
    """
    last = bisect_left(BATCH_SIZES, min(max_concurrency, BATCH_SIZES[-1]))
    return BATCH_SIZES[: last + 1]


class DecodeGraphs:
    """The graphs of one model and its KV cache. Used by the engine's thread only."""

    def __init__(
        self,
        model: DecoderModel,
        cache: KvCache,
        capturer: Capturer,
        *,
        sizes: Sequence[int],
        max_model_len: int,
        memory: Memory,
        timeline: Timeline | None = None,
    ) -> None:
        self.sizes = tuple(sizes)
        self.graphs: dict[int, Graph] = {}
        self.replays = 0
        self._model = model
        self.cache = cache
        self.capturer = capturer
        self._timeline = timeline
        self.inputs = StaticInputs(
            memory,
            cache.pool.device,
            rows=self.sizes[-1],
            blocks=blocks_for(max_model_len),
            vocab=model.config.vocab_size,
            dtype=cache.shape.dtype,
            spare=cache.spare,
        )
        self._disabled: str | None = None

    @property
    def pending(self) -> list[int]:
        """The sizes without a graph, the largest first, because smaller graphs reuse the memory of larger ones."""
        return [] if self._disabled else [size for size in reversed(self.sizes) if size not in self.graphs]

    @property
    def first_sizes(self) -> tuple[int, ...]:
        """The sizes to restore first: the small ones, for few requests, and the largest, which fits every batch."""
        return tuple(size for size in self.sizes if size in _FIRST_SIZES or size == self.sizes[-1])

    def adopt(self, graphs: Mapping[int, Graph]) -> None:
        """Use graphs that were restored from a state bundle. Graphs for other sizes are ignored."""
        self.graphs.update({size: graph for size, graph in graphs.items() if size in self.sizes})

    def size_for(self, count: int, others: Container[int] = ()) -> int | None:
        """Return the smallest size of at least ``count`` that has a graph, or is among ``others``; None without any."""
        first = bisect_left(self.sizes, count)
        return next((size for size in self.sizes[first:] if size in self.graphs or size in others), None)

    @staticmethod
    def are_decodes(spans: Sequence[Span]) -> bool:
        """Return whether all of these spans are the last tokens of their sequences."""
        return all(stop - start == 1 and stop == len(sequence.tokens) for sequence, start, stop in spans)

    def can_run(self, spans: Sequence[Span]) -> bool:
        """Return whether all of these spans are decodes, and there is a graph for this many."""
        return self.are_decodes(spans) and self.size_for(len(spans)) is not None

    def run(self, spans: Sequence[Span]) -> Tensor:
        """Run one decode step. Returns logits [spans, vocab], which the next run overwrites."""
        size = self.size_for(len(spans))
        assert size is not None
        self.inputs.fill(spans, size)
        self.graphs[size].replay()
        self.replays += 1
        return self.inputs.logits[: len(spans)]

    def run_eagerly(self, size: int, layers: int | None = None) -> None:
        """Run eagerly what the graph of this size does, from the first ``size`` rows of the inputs to their logits.

        ``layers``: run only the first so many of the model's layers.
        """
        inputs = self.inputs
        attention = DecodeAttention(self.cache, inputs.slots[:size], inputs.contexts[:size], inputs.tables[:size])
        positions = inputs.positions[:size]
        hidden = self._model.embed(inputs.token_ids[:size], positions)
        hidden = self._model.run_layers(hidden, positions, attention, stop=layers)
        inputs.logits[:size].copy_(self._model.logits(hidden))

    def capture(self, size: int) -> None:
        """Warm up and capture one size, even before the weights are loaded. A failure is logged and ends capturing."""
        start_ns = time.monotonic_ns()

        def work() -> None:
            self.run_eagerly(size)

        try:
            with bypass_gates(), torch.inference_mode():
                self.inputs.fill([], self.inputs.rows)
                self.capturer.warm_up(work)
                warm_ns = time.monotonic_ns()
                self.graphs[size] = self.capturer.capture(work)
        except Exception as error:  # noqa: BLE001 - decoding goes on without this graph
            self._disabled = f"{type(error).__name__}: {error}"
            logger.warning("decode steps run without a CUDA graph: batch size %d: %s", size, self._disabled)
            return
        if self._timeline is not None:
            self._timeline.record("warm_up", start_ns, warm_ns, batch=size)
            self._timeline.record("capture", warm_ns, time.monotonic_ns(), batch=size)

    def capture_first_layer(self, size: int, capturer: Capturer) -> Graph:
        """Capture a step of the first layer alone, which loads the modules of all kinds of kernels (MEDUSA §5.2)."""
        work = partial(self.run_eagerly, size, 1)
        with bypass_gates(), torch.inference_mode():
            self.inputs.fill([], self.inputs.rows)
            capturer.warm_up(work)
            return capturer.capture(work)

    def capture_for(self, count: int) -> None:
        """Capture at most one size for steps of ``count`` sequences, since an engine with work may never be idle.

        The largest size comes first: its graph runs such a step at once, and smaller graphs reuse its memory. The next
        step captures the size that fits best.
        """
        if count > self.sizes[-1]:
            return
        pending, best = self.pending, self.sizes[bisect_left(self.sizes, count)]
        size = next((size for size in (self.sizes[-1], best) if size in pending), None)
        if size is not None:
            self.capture(size)

    def capture_next(self) -> None:
        """Capture the largest size without a graph."""
        pending = self.pending
        if pending:
            self.capture(pending[0])
