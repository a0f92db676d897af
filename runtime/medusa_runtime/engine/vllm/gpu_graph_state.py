"""Between vLLM's graphs and a state bundle's blueprints: names, references, what they are valid for.

The scheme is the torch engine's (``engine/graph_state.py``), but for memory: vLLM's stays where torch has put it, and
graphs are relocated to it. Only their pool, and workspaces that have no name, are placed here.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import __version__
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from ...state.graphs import (
    Blueprints,
    Capture,
    CudaDriver,
    DeviceRegion,
    ImageStore,
    MismatchError,
    Piece,
    Placement,
    Reason,
    RegionKind,
    RestoredGraphs,
    Trigger,
    dump_graphs,
    fingerprint,
    materialize_graphs,
    place,
    restore_graphs,
)
from ..graph_memory import Segments, other_regions
from .gpu_graphs import Restored, key_of
from .gpu_memory import named_regions
from .gpu_recording import HIDDEN, Recording, is_input

logger = logging.getLogger(__name__)

KV_BYTES = "kv_cache_bytes"
_REFERENCE_BYTES = 1024  # of a row's hidden states
_REFERENCE_ROWS = 16
_PLACED = (RegionKind.SLAB, RegionKind.WORKSPACE)


def obstacle(runner: Any, manager: Any) -> str | None:
    """Why this configuration's graphs are captured each time; None where they can be materialized."""
    if not (manager.is_first_pp_rank and manager.is_last_pp_rank) or manager.tp_size > 1 or manager.dp_size > 1:
        return "the model is spread over several GPUs"
    if runner.lora_config is not None:
        return "there are LoRA adapters"
    if getattr(runner, "use_aux_hidden_state_outputs", False) or getattr(runner, "speculator", None) is not None:
        return "there is a speculator"
    return None


class VllmGraphState:
    """One worker's graphs: ``dump`` and ``materialize`` where they were captured, ``restore`` where they were not."""

    def __init__(
        self,
        driver: CudaDriver,
        runner: Any,
        manager: Any,
        *,
        segments: Callable[[], Segments] | None = None,
        device: str = "cuda",
    ) -> None:
        self._driver, self._runner, self._manager = driver, runner, manager
        self._segments = segments or torch.cuda.memory_snapshot
        self._device = device
        self._kept: list[RestoredGraphs | Placement] = []  # the graphs' memory and kernels live as long as they do

    def named(self) -> list[DeviceRegion]:
        return named_regions(self._runner, lambda tensor: tensor.device.type == self._device)

    def read(self, region: DeviceRegion) -> bytes:
        return self._driver.read(region.address, region.size)

    def fingerprint(self) -> dict[str, str]:
        """What must be equal where the graphs are restored. Sizes of memory are compared region by region."""
        config = self._runner.model_config
        model = hashlib.sha256(repr(config.hf_config).encode()).hexdigest()[:16]
        own = {"torch": torch.__version__, "vllm": __version__, "model": model, "dtype": str(config.dtype)}
        return fingerprint(self._driver, own)

    def dump(self, images: Sequence[bytes]) -> Blueprints:
        """All captured full graphs as they are. ``images``: of all modules loaded so far."""
        handles = {key_of(one): int(graph.raw_cuda_graph()) for one, graph in self._full()}
        named = self.named()
        regions = [*named, *other_regions(named, self._segments(), self._manager.pool)]
        return dump_graphs(self._driver, handles, regions, images=ImageStore(images))

    def materialize(
        self,
        recording: Recording,
        images: Sequence[bytes],
        second: Blueprints | None,
        *,
        stream: Any,
        libraries: Sequence[Path] = (),
    ) -> Blueprints:
        """``second``: the same by another process, in which nothing lies where it does here."""
        dump = self.dump(images)
        numbers = {region.name: number for number, region in enumerate(dump.regions)}
        full = dict(self._full())
        read: dict[str, tuple[Piece, ...]] = {}
        for one in full:
            known = [(region, data) for region, data in recording.inputs[one] if region.name in numbers]
            read[key_of(one)] = tuple(Piece(numbers[region.name], 0, data) for region, data in known)
        capture = Capture(
            {key_of(one): partial(_launch, graph, stream) for one, graph in full.items()},
            read,
            {key_of(one): self._outputs(one, numbers[HIDDEN]) for one in full},
            stream.cuda_stream,
            ImageStore(images),
            fingerprint=self.fingerprint() | {KV_BYTES: str(self._kv_bytes())},
            libraries=libraries,
        )
        return _without_stale_state(materialize_graphs(self._driver, dump, capture, second=second))

    def restore(
        self, data: Blueprints | bytes, *, trigger: Trigger | None = None, validate: str = "ends"
    ) -> Restored | None:
        """As many graphs as fit here; why the others do not is logged once. DeviceError when the context is lost."""
        blueprints = Blueprints.load(data) if isinstance(data, bytes) else data
        used = blueprints.used_regions()
        recorded = {region.name: region for n, region in enumerate(blueprints.regions) if n in used}
        full = self._manager._capture_descs.get(CUDAGraphMode.FULL, [])
        hidden = self._hidden_states(recorded.get(HIDDEN), full)
        if hidden is None:
            return None
        here = {region.name: region for region in self.named()}
        here[HIDDEN] = DeviceRegion(HIDDEN, RegionKind.NAMED, hidden.data_ptr(), hidden.nbytes)
        # One of another size has other strides or rows: as if it were not there, which each graph's reason will say.
        placed = {
            name: here[name].address
            for name, region in recorded.items()
            if name in here and region.size == here[name].size
        }
        wanted = [region for region in recorded.values() if region.kind in _PLACED]
        placement = place(self._driver, wanted, placed=placed)
        self._kept.append(placement)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        before = [(region, self.read(region)) for name, region in here.items() if name in recorded and is_input(region)]
        restored = restore_graphs(
            self._driver,
            blueprints,
            placement,
            keys=[key_of(one) for one in full],
            stream=stream.cuda_stream,
            fingerprint=self.fingerprint() | {KV_BYTES: str(self._kv_bytes())},
            current_stream=lambda: torch.cuda.current_stream().cuda_stream,
            trigger=trigger,
            validate=validate,
        )
        for region, contents in before:
            self._driver.write(region.address, contents)
        self._kept.append(restored)
        return Restored(restored.graphs, hidden) if restored.graphs else None

    def _hidden_states(self, region: DeviceRegion | None, full: Sequence[BatchExecutionDescriptor]) -> Tensor | None:
        """What vLLM allocates in its first warm-up: rows of the largest batch."""
        if region is None or not full:
            return None
        dtype, rows = self._runner.model_config.dtype, max(one.num_tokens for one in full)
        width, rest = divmod(region.size, rows * dtype.itemsize)
        if rest:
            detail = f"{HIDDEN} has {region.size} bytes for batches of up to {rows}"
            raise MismatchError(Reason.LIBRARY, detail)
        return torch.empty(rows, width, dtype=dtype, device=self._runner.device)

    def _kv_bytes(self) -> int:
        caches = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in self._runner.kv_caches}
        return sum(storage.nbytes() for storage in caches.values())

    def _full(self) -> list[tuple[BatchExecutionDescriptor, Any]]:
        listed = [(one, graph) for one, graph in self._manager.graphs.items() if one.num_ubatches == 1]
        return [(one, graph) for one, graph in listed if one.cg_mode == CUDAGraphMode.FULL]

    def _outputs(self, one: BatchExecutionDescriptor, region: int) -> tuple[Piece, ...]:
        row_bytes = self._manager.hidden_states[0].nbytes
        rows = sorted({*range(min(one.num_tokens, _REFERENCE_ROWS)), one.num_tokens - 1})
        return tuple(Piece(region, row * row_bytes, bytes(min(_REFERENCE_BYTES, row_bytes))) for row in rows)


def _launch(graph: Any, stream: Any) -> None:
    with torch.cuda.stream(stream):
        graph.replay()


def _without_stale_state(made: Blueprints) -> Blueprints:
    """Refuse all graphs if one needs what is in a workspace: each step may write it anew, at an address that is not
    known here. And inputs that no graph reads are left out."""
    for piece in made.contents:
        region = made.regions[piece.region]
        if region.kind == RegionKind.WORKSPACE:
            why = f"{Reason.CONTENTS}: they read {region.name}, which has no name and may change with each step"
            refused = {**made.refused, **{graph.key: why for graph in made.graphs}}
            return replace(made, graphs=(), contents=(), images={}, refused=refused)
    graphs = []
    for graph in made.graphs:
        read = {relocation.region for relocation in graph.relocations}
        graphs.append(replace(graph, inputs=tuple(piece for piece in graph.inputs if piece.region in read)))
    return replace(made, graphs=tuple(graphs))


__all__ = ["KV_BYTES", "VllmGraphState", "obstacle"]
