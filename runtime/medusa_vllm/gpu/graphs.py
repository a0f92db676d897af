"""vLLM's CUDA graphs: restored where there is a blueprint, else captured (vLLM 0.32, model runner V2).

A full graph is an entry in the manager's ``graphs``, by the description of its batch. The graph copies its outputs to
the manager's ``hidden_states``. So a restored graph becomes an entry like any other, and ``hidden_states`` must lie
where the graph writes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar
from unittest.mock import patch

import torch
from medusa_runtime.errors import DeviceError, EngineError
from medusa_runtime.state.graphs.driver import CudaError
from medusa_runtime.timeline import Timeline
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager, ModelCudaGraphManager

logger = logging.getLogger(__name__)


class Replayable(Protocol):
    def replay(self) -> None: ...


class RestoredDecodeGraphs(NamedTuple):
    """Graphs by key (see ``key_of``), and the tensor that they write their hidden states to."""

    graphs: Mapping[str, Replayable]
    hidden_states: Any


class NoTimeline:
    """A timeline that keeps nothing, for a vLLM that was started with our worker, but not by us."""

    def stage(self, name: str, **detail: Any) -> nullcontext[dict[str, Any]]:
        return nullcontext(detail)

    def record(self, name: str, start_ns: int, end_ns: int, **detail: Any) -> None: ...


RestorePieces = Callable[
    [Any], Sequence[Any]
]  # from vLLM's create_forward_fn to the batches whose pieces were restored
Restore = Callable[[Any], RestoredDecodeGraphs | None]  # from the manager to the restored graphs; None if nothing fits


def key_of(description: BatchExecutionDescriptor) -> str:
    """Return the name of a batch's description in a bundle. Equal descriptions have equal names in every process."""
    return "vllm " + " ".join(f"{name}={value}" for name, value in _fields(description))


def _fields(description: BatchExecutionDescriptor) -> list[tuple[str, object]]:
    return [
        ("mode", description.cg_mode.name),
        ("tokens", description.num_tokens),
        ("requests", description.num_reqs),
        ("uniform", description.uniform_token_count),
        ("query", description.max_query_len),
        ("loras", description.num_active_loras),
        ("ubatches", description.num_ubatches),
    ]


def context_is_lost(error: Exception) -> bool:
    """Return whether the device's context broke, according to the validation of a restored graph."""
    found = error.__cause__ if isinstance(error, DeviceError) else None
    return isinstance(found, CudaError) and found.sticky


Manager = TypeVar("Manager", bound=ModelCudaGraphManager)


def convert_manager(kind: type[Manager], manager: ModelCudaGraphManager) -> Manager:
    """Turn vLLM's own manager, which has captured nothing yet, into a manager of another class."""
    assert not manager.graphs
    made: Manager = object.__new__(kind)
    made.__dict__.update(manager.__dict__)
    return made


def keep_graph_nodes() -> AbstractContextManager[Any]:
    """Keep the nodes of graphs captured in this context readable. Such graphs are not instantiated."""
    return patch.object(torch.cuda, "CUDAGraph", partial(torch.cuda.CUDAGraph, keep_graph=True))


@contextmanager
def _one_layer(model: Any) -> Iterator[None]:
    """Let vLLM's model run only its first layer in this context.

    Raises EngineError if the layers are not listed as in most models.
    """
    stacks = [one for one in model.modules() if hasattr(one, "start_layer") and hasattr(one, "end_layer")]
    if len(stacks) != 1:
        raise EngineError("the layers of this model cannot be run one by one")
    (stack,) = stacks
    end, stack.end_layer = stack.end_layer, stack.start_layer + 1
    try:
        yield
    finally:
        stack.end_layer = end


class _PiecewiseManager(CudaGraphManager):  # type: ignore[misc]
    """The part of a manager that vLLM calls to capture. It restores piecewise graphs if it can."""

    def capture(self, create_forward_fn: Any, *arguments: Any, **options: Any) -> None:
        batches = self._capture_descs.get(CUDAGraphMode.PIECEWISE, [])
        # Nothing was restored, so keep vLLM's own order: the largest first, whose memory serves the others.
        if self._pieces is None or not self.graphs or len(batches) < 2 or self.use_breakable_cg:
            super().capture(create_forward_fn, *arguments, **options)
            return
        # vLLM captures the smallest: its first forward compiles, or loads compiled code, and makes the wrappers.
        with _only(self._capture_descs, {CUDAGraphMode.PIECEWISE: batches[-1:]}):
            super().capture(create_forward_fn, *arguments, **options)
        start_ns = time.monotonic_ns()
        restored = self._restored_pieces(create_forward_fn, batches[:-1])
        self._timeline.record("restore_graphs", start_ns, time.monotonic_ns(), graphs=len(restored), mode="piecewise")
        left = [one for one in batches[:-1] if one not in restored]
        with _only(self._capture_descs, {**self._capture_descs, CUDAGraphMode.PIECEWISE: left}):
            super().capture(create_forward_fn, *arguments, **options)

    def _restored_pieces(self, create_forward_fn: Any, batches: Sequence[Any]) -> Sequence[Any]:
        try:
            with _only(self._capture_descs, {CUDAGraphMode.PIECEWISE: list(batches)}):
                return list(self._pieces(create_forward_fn))
        except Exception as error:
            if context_is_lost(error):
                raise  # nothing can be captured in this process either
            logger.warning("piecewise CUDA graphs are captured, not restored: %s", error)
            return []


class GraphManager(ModelCudaGraphManager, _PiecewiseManager):  # type: ignore[misc]
    """vLLM's own manager, turned into this one right after vLLM made it, before it captures anything."""

    @classmethod
    def of(
        cls,
        manager: ModelCudaGraphManager,
        restore: Restore,
        timeline: Timeline | NoTimeline,
        pieces: RestorePieces | None = None,
    ) -> GraphManager:
        made = convert_manager(cls, manager)
        made._restore = restore
        made._pieces = pieces
        made._timeline = timeline
        made._triggered = []
        return made

    def first_layer(self, key: str) -> int:
        """Capture a step of one layer with this batch, which loads the modules of its kernels (MEDUSA §5.2)."""
        (one,) = [one for one in self._capture_descs[CUDAGraphMode.FULL] if key_of(one) == key]
        # In a pool of its own, because this graph is never run.
        own = {"_capture_descs": {CUDAGraphMode.FULL: [one]}, "graphs": {}, "hidden_states": None}
        scratch = convert_manager(ModelCudaGraphManager, self)
        scratch.__dict__.update(own, pool=torch.cuda.graph_pool_handle())
        arguments, options = self._arguments
        with keep_graph_nodes(), _one_layer(arguments[0]):
            scratch.capture(*arguments, **options)
        self._triggered.append(scratch)
        return int(scratch.graphs[one].raw_cuda_graph())

    def capture(self, *arguments: Any, **options: Any) -> None:
        """Restore the graphs that fit, and let vLLM capture the others. A bundle never makes this fail."""
        start_ns = time.monotonic_ns()
        self._arguments = arguments, options
        restored = self._restored()
        if restored is not None:
            self._adopt(restored)
            self._timeline.record("restore_graphs", start_ns, time.monotonic_ns(), graphs=len(self.graphs))
        if self._graphs_captured:
            return
        start_ns = time.monotonic_ns()
        adopted = len(self.graphs)
        missing = {
            mode: [one for one in every if one not in self.graphs] for mode, every in self._capture_descs.items()
        }
        with _only(self._capture_descs, missing):
            super().capture(*arguments, **options)
        self._timeline.record("capture", start_ns, time.monotonic_ns(), graphs=len(self.graphs) - adopted)

    def _restored(self) -> RestoredDecodeGraphs | None:
        if self._capture_mem_samples is not None:  # vLLM measures captures in a pool that it throws away
            return None
        try:
            restored: RestoredDecodeGraphs | None = self._restore(self)
            self._triggered.clear()  # their kernels have been found
        except Exception as error:
            if context_is_lost(error):
                raise  # nothing can be captured in this process either
            logger.warning("CUDA graphs are captured and not restored: %s: %s", type(error).__name__, error)
            return None
        return restored

    def _adopt(self, restored: RestoredDecodeGraphs) -> None:
        full = self._capture_descs.get(CUDAGraphMode.FULL, [])
        found = {one: restored.graphs[key_of(one)] for one in full if key_of(one) in restored.graphs}
        if not found:
            return
        self.graphs.update(found)
        self.hidden_states = restored.hidden_states
        everything = sum(len(descriptions) for descriptions in self._capture_descs.values())
        self._graphs_captured = len(found) == everything


@contextmanager
def _only(descriptions: dict[Any, list[Any]], wanted: dict[Any, list[Any]]) -> Iterator[None]:
    """A context in which only these descriptions are captured."""
    everything = dict(descriptions)
    descriptions.clear()
    descriptions.update(wanted)
    try:
        yield
    finally:
        descriptions.clear()
        descriptions.update(everything)


__all__ = [
    "GraphManager",
    "NoTimeline",
    "Replayable",
    "Restore",
    "RestoredDecodeGraphs",
    "context_is_lost",
    "convert_manager",
    "keep_graph_nodes",
    "key_of",
]
