"""Lets vLLM capture its graphs offline, and keeps what a restore needs (vLLM 0.32, model runner V2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from medusa_runtime.engine.gpu.graph_pool import GraphPool, open_pool
from medusa_runtime.state.graphs import CudaDriver
from medusa_runtime.state.graphs.blueprint import MemoryRange
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager, ModelCudaGraphManager

from .graphs import convert_manager, keep_graph_nodes

HIDDEN = "cudagraph_manager.hidden_states"  # all graphs write their results there
_KINDS = 16  # how many different rows a reference has, each in a block of its own
_LARGEST_INPUT_BYTES = 16 << 20

Snapshot = tuple[tuple[MemoryRange, bytes], ...]


class _RecordingCapture(CudaGraphManager):  # type: ignore[misc]
    """The part of a manager that vLLM calls to capture. It keeps the graphs' nodes, and the inputs of a replay."""

    def capture(self, create_forward_fn: Any, *arguments: Any, **options: Any) -> None:
        def create(description: BatchExecutionDescriptor, warmup: bool) -> Any:
            if warmup:
                self.recording.make_workspace(self.device)
            forward = create_forward_fn(description, warmup=warmup)
            # For piecewise graphs vLLM uses one forward to warm up and to capture; it can be run again.
            if warmup == (description.cg_mode == CUDAGraphMode.PIECEWISE):
                self.recording.record_inputs(description)
                self.recording.forwards[description] = forward
            return forward

        with keep_graph_nodes():
            super().capture(create, *arguments, **options)
        for graph in self.graphs.values():
            graph.instantiate()


class RecordingManager(ModelCudaGraphManager, _RecordingCapture):  # type: ignore[misc]
    """vLLM's own manager, turned into one that reports to ``recording`` each batch whose inputs are laid out."""

    recording: Recording

    @classmethod
    def of(cls, manager: ModelCudaGraphManager, recording: Recording) -> RecordingManager:
        made = convert_manager(cls, manager)
        made.recording = recording
        recording.manager = made
        return made

    def capture(self, *arguments: Any, **options: Any) -> None:
        if self._capture_mem_samples is None:
            super().capture(*arguments, **options)


class Recording:
    """One capture of all graphs. ``inputs`` maps descriptions to their reference replay's inputs: ranges and bytes."""

    def __init__(self, pool_base: int, *, shifts: Iterable[int] = ()) -> None:
        """``pool_base`` is the address of the pool in which graphs are captured.

        ``shifts`` are bytes to allocate at each stage of a start, so that memory moves from process to process.
        """
        self.pool: GraphPool | None = None
        self._pool_base = pool_base
        self.runner: Any = None
        self.manager: Any = None
        self.inputs: dict[BatchExecutionDescriptor, Snapshot] = {}
        self.forwards: dict[BatchExecutionDescriptor, Callable[[CUDAGraphMode], None]] = {}
        self.state: Any = None
        self._make_state: Callable[[Any, Any], Any] | None = None
        self._small: list[MemoryRange] = []
        self._shifts = list(shifts)
        self._shift_tensors: list[Tensor] = []

    def open_pool(self, driver: CudaDriver) -> None:
        """Let vLLM capture all graphs in one pool at the chosen address. Call it before vLLM makes its manager."""
        self.pool = open_pool(driver, self._pool_base)
        if self.pool is not None:
            type(current_platform)._global_graph_pool = self.pool.id

    def make_workspace(self, device: torch.device) -> None:
        """Let cuBLAS allocate its workspace for the current stream, which captured products use, in the pool."""
        if self.pool is not None:
            with self.pool.in_use():
                one = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
                torch.mm(one, one)

    def attach(self, make_state: Callable[[Any, Any], Any]) -> None:
        """Set the function that makes a VllmGraphState, which is called once runner and manager are there."""
        self._make_state = make_state

    def shift(self, device: torch.device) -> None:
        """Allocate the next of the ``shifts``, if any are left."""
        if self._shifts:
            self._shift_tensors.append(torch.empty(self._shifts.pop(), dtype=torch.uint8, device=device))

    def record_inputs(self, description: BatchExecutionDescriptor) -> None:
        """Keep the contents of all small memory that has a name and is not a weight. A graph may read any of it."""
        runner = self.runner
        if self.state is None:
            assert self._make_state is not None
            self.state = self._make_state(runner, self.manager)
        if description.num_reqs == description.num_tokens:
            blocks = runner.kv_cache_config.num_blocks
            vocab = runner.model_config.get_vocab_size()
            fill_reference_inputs(
                runner.input_buffers, runner.block_tables, description.num_tokens, blocks=blocks, vocab=vocab
            )
        elif description.num_reqs is None:  # the graph is for any number of requests; vLLM's layout for attention stays
            ids = runner.input_buffers.input_ids[: description.num_tokens]
            ids.copy_(torch.arange(len(ids), device=ids.device) * 37 % runner.model_config.get_vocab_size())
        if not self._small:  # it is neither made nor moved between two captures
            self._small = [memory_range for memory_range in self.state.named() if is_input(memory_range)]
        self.inputs[description] = self.state.read(self._small)


def is_input(memory_range: MemoryRange) -> bool:
    """Return whether a replay may read data in this range that each step writes anew."""
    if memory_range.name.startswith(("model.", "kv_caches.")) or memory_range.name == HIDDEN:
        return False
    return memory_range.size <= _LARGEST_INPUT_BYTES


def fill_reference_inputs(buffers: Any, tables: Any, rows: int, *, blocks: int, vocab: int) -> None:
    """Fill rows of one token each, of several kinds.

    The batches that vLLM captures have no slots, so they attend to nothing.
    """
    kinds = min(_KINDS, blocks - 1)
    if kinds < 1:
        return
    kind = torch.arange(rows, device=buffers.input_ids.device) % kinds
    buffers.input_ids[:rows] = ((kind * 37 + 5) % vocab).to(buffers.input_ids.dtype)
    buffers.is_padding[:rows] = False
    for group, (table, size) in enumerate(zip(tables.input_block_tables, tables.block_sizes, strict=True)):
        table[:rows, 0] = (kind + 1).to(table.dtype)  # no sequence has block 0, which has to stay zero
        tables.slot_mappings[group, :rows] = (kind + 1) * size


__all__ = ["HIDDEN", "Recording", "RecordingManager", "Snapshot", "fill_reference_inputs", "is_input"]
