"""vLLM's piecewise CUDA graphs (vLLM 0.32): one for each compiled function and batch, with attention between.

Each is an entry of its function's wrapper, beside the tensors that a replay returns. These lie in the graphs' pool,
where the next function's graph reads them. So a restored entry returns tensors at the same places of the restored pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from medusa_runtime.engine.gpu.placed_memory import tensor_at
from medusa_runtime.state.graphs import GraphMismatch, MemoryRange, Reason
from medusa_runtime.state.graphs.materialization.memory_ranges import RangeMap
from torch import Tensor
from vllm.compilation.cuda_graph import CUDAGraphEntry, CUDAGraphWrapper
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from .graphs import Replayable, key_of

_MARK = " piece="
Results = Any  # JSON: numbers, None, ["tuple", …], ["list", …], ["tensor", range, offset, dtype, shape, strides]


def piece_key(description: BatchExecutionDescriptor, name: str) -> str:
    return f"{key_of(description)}{_MARK}{name}"


def batch_of(key: str) -> str:
    """Return the key of the whole batch that a piece or a full graph belongs to."""
    return key.partition(_MARK)[0]


def compiled_functions() -> dict[str, CUDAGraphWrapper]:
    """Return each compiled function's wrapper by the function's name, which is the same in every process.

    The first forward makes the wrappers. Raises GraphMismatch if they cannot be told apart.
    """
    found: dict[str, CUDAGraphWrapper] = {}
    for wrapper in CUDAGraphWrapper._all_instances:
        if wrapper.runtime_mode != CUDAGraphMode.PIECEWISE:
            continue
        backend = getattr(wrapper.runnable, "vllm_backend", None)
        if backend is None:
            raise GraphMismatch(Reason.PIECEWISE, "Inductor has parted the model, not vLLM")
        name = f"{backend.prefix} {wrapper.runnable.piecewise_compile_index}"
        if name in found:
            raise GraphMismatch(Reason.PIECEWISE, f"two compiled functions are called {name}")
        if wrapper.is_debugging_mode:
            raise GraphMismatch(Reason.PIECEWISE, "vLLM compares addresses when it logs debugging messages")
        found[name] = wrapper
    return dict(sorted(found.items()))


def is_last(wrapper: CUDAGraphWrapper) -> bool:
    """Return whether this function returns the result of the whole forward."""
    return bool(wrapper.runnable.is_last_graph)


def entry_of(wrapper: CUDAGraphWrapper, description: BatchExecutionDescriptor) -> CUDAGraphEntry | None:
    found = wrapper.concrete_cudagraph_entries.get(_descriptor(description))
    return found if found is not None and found.cudagraph is not None else None


def put_entry(
    wrapper: CUDAGraphWrapper, description: BatchExecutionDescriptor, graph: Replayable | None, output: Any = None
) -> None:
    """Put a graph where vLLM would put a captured one. Without a graph, vLLM captures it."""
    wrapper.concrete_cudagraph_entries.pop(_descriptor(description), None)
    if graph is not None:
        entry = CUDAGraphEntry(_descriptor(description), cudagraph=graph, output=output)
        wrapper.concrete_cudagraph_entries[_descriptor(description)] = entry


def _descriptor(description: BatchExecutionDescriptor) -> BatchDescriptor:
    """Return the description that a manager's forward gives to the wrappers."""
    return BatchDescriptor(num_tokens=description.num_tokens, num_active_loras=description.num_active_loras)


def encode_results(output: Any, ranges: Sequence[MemoryRange]) -> Results:
    """Return a function's return value as JSON, with places for tensors. Raises GraphMismatch for other values."""
    places = RangeMap(ranges)

    def encoded(value: Any) -> Results:
        if isinstance(value, Tensor):
            found = places.places(value.data_ptr())
            if not found:
                raise GraphMismatch(Reason.FOREIGN_POINTER, "a compiled function returns memory that nobody named")
            dtype = str(value.dtype).removeprefix("torch.")
            return ["tensor", found[0].memory_range, found[0].offset, dtype, list(value.shape), list(value.stride())]
        if isinstance(value, tuple | list):
            return [type(value).__name__, *map(encoded, value)]
        if value is None or isinstance(value, int | float):
            return value
        raise GraphMismatch(Reason.PIECEWISE, f"a compiled function returns a {type(value).__name__}")

    return encoded(output)


class ResultBuilder:
    """Builds functions' return values from JSON, with tensors at the ranges' present addresses."""

    def __init__(self, ranges: Sequence[MemoryRange], addresses: Mapping[str, int], device: torch.device) -> None:
        self._ranges, self._addresses, self._device = ranges, addresses, device
        self._whole: dict[tuple[int, torch.dtype], Tensor] = {}  # ranges as one tensor, of which results are parts

    def build(self, results: Results) -> Any:
        """Raises GraphMismatch (CORRUPT) if they are not ``encode_results``' of these ranges."""
        try:
            return self._built(results)
        except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise GraphMismatch(Reason.CORRUPT, f"results of a compiled function: {error}") from error

    def _built(self, value: Results) -> Any:
        if not isinstance(value, list):
            return value
        kind, *rest = value
        if kind in ("tuple", "list"):
            made = [self._built(one) for one in rest]
            return tuple(made) if kind == "tuple" else made
        number, offset, name, shape, strides = rest
        dtype = getattr(torch, name)
        last = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        first, misplaced = divmod(offset, dtype.itemsize)
        end = offset + (last + 1) * dtype.itemsize
        if misplaced or min([offset, last, *shape, *strides]) < 0 or end > self._ranges[number].size:
            raise ValueError(f"bytes {offset} to {end} of {self._ranges[number].name}")
        return self._all_of(number, dtype).as_strided(shape, strides, first)

    def _all_of(self, number: int, dtype: torch.dtype) -> Tensor:
        if (number, dtype) not in self._whole:
            memory_range = self._ranges[number]
            size = memory_range.size // dtype.itemsize * dtype.itemsize
            made = tensor_at(self._addresses[memory_range.name], size, self._device).view(dtype)
            self._whole[number, dtype] = made
        return self._whole[number, dtype]


__all__ = [
    "ResultBuilder",
    "Results",
    "batch_of",
    "compiled_functions",
    "encode_results",
    "entry_of",
    "is_last",
    "piece_key",
    "put_entry",
]
