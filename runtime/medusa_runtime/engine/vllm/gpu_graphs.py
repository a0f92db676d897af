"""vLLM's CUDA graphs, restored where there is a blueprint, captured where there is none (vLLM 0.32, model runner V2).

A full graph of vLLM's is an entry in the manager's ``graphs``, by the description of its batch; its outputs are copied
inside the graph into the manager's ``hidden_states``. So a restored graph takes its place by being put there, and
``hidden_states`` must lie where the graph writes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from ...errors import DeviceError
from ...state.graphs.driver import CudaError
from ...timeline import Timeline

logger = logging.getLogger(__name__)


class Replayable(Protocol):
    def replay(self) -> None: ...


class Restored(NamedTuple):
    """Graphs by their keys (see ``key_of``), and the tensor that they write their hidden states to."""

    graphs: Mapping[str, Replayable]
    hidden_states: Any


class NoTimeline:
    """Of a vLLM that somebody else has started, with our worker."""

    def stage(self, name: str, **detail: Any) -> nullcontext[dict[str, Any]]:
        return nullcontext(detail)

    def record(self, name: str, start_ns: int, end_ns: int, **detail: Any) -> None: ...


Restore = Callable[[Any], Restored | None]  # given the manager; None: there is nothing that fits


def key_of(description: BatchExecutionDescriptor) -> str:
    """A batch's description as a bundle names it; equal for equal descriptions in every process."""
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


def lost(error: Exception) -> bool:
    """Whether the device's context broke, as a restored graph's validation says."""
    found = error.__cause__ if isinstance(error, DeviceError) else None
    return isinstance(found, CudaError) and found.sticky


class GraphManager(ModelCudaGraphManager):  # type: ignore[misc]
    """Made of vLLM's own manager, right after vLLM has made it; nothing is captured by then."""

    @classmethod
    def of(cls, manager: ModelCudaGraphManager, restore: Restore, timeline: Timeline | NoTimeline) -> GraphManager:
        assert not manager.graphs
        made = cls.__new__(cls)
        made.__dict__.update(manager.__dict__)
        made._restore = restore
        made._timeline = timeline
        return made

    def capture(self, *arguments: Any, **options: Any) -> None:
        """Restore what can be, and let vLLM capture the rest. Never fails for a bundle's sake."""
        start_ns = time.monotonic_ns()
        restored = self._restored()
        if restored is not None:
            self._adopt(restored)
            self._timeline.record("restore_graphs", start_ns, time.monotonic_ns(), graphs=len(self.graphs))
        if self._graphs_captured:
            return
        start_ns = time.monotonic_ns()
        adopted = len(self.graphs)
        with _without(self._capture_descs, self.graphs):
            super().capture(*arguments, **options)
        self._timeline.record("capture", start_ns, time.monotonic_ns(), graphs=len(self.graphs) - adopted)

    def _restored(self) -> Restored | None:
        if self._capture_mem_samples is not None:  # vLLM measures captures in a pool that it throws away
            return None
        try:
            restored: Restored | None = self._restore(self)
        except Exception as error:
            if lost(error):
                raise  # nothing can be captured in this process either
            logger.warning("CUDA graphs are captured and not restored: %s: %s", type(error).__name__, error)
            return None
        return restored

    def _adopt(self, restored: Restored) -> None:
        full = self._capture_descs.get(CUDAGraphMode.FULL, [])
        found = {one: restored.graphs[key_of(one)] for one in full if key_of(one) in restored.graphs}
        if not found:
            return
        self.graphs.update(found)
        self.hidden_states = restored.hidden_states
        everything = sum(len(descriptions) for descriptions in self._capture_descs.values())
        self._graphs_captured = len(found) == everything


class _without:
    """While inside, descriptions that have a graph are not among those to be captured."""

    def __init__(self, descriptions: dict[Any, list[Any]], graphs: Mapping[Any, Any]) -> None:
        self._descriptions = descriptions
        self._graphs = graphs
        self._all = dict(descriptions)

    def __enter__(self) -> None:
        for mode, descriptions in self._all.items():
            self._descriptions[mode] = [one for one in descriptions if one not in self._graphs]

    def __exit__(self, *_: object) -> None:
        self._descriptions.update(self._all)


__all__ = ["GraphManager", "NoTimeline", "Replayable", "Restore", "Restored", "key_of", "lost"]
