"""Translates between the engine's decode graphs and a state bundle's blueprints."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...models import DecoderModel
from ...state.graphs import CudaDriver
from ...state.graphs.blob_format import decode_blueprints
from ...state.graphs.blueprint import Blueprints, MemoryRange, Piece, RangeKind
from ...state.graphs.compiled import used_ranges
from ...state.graphs.fingerprint import fingerprint
from ...state.graphs.materialization.dump import dump_graphs
from ...state.graphs.materialization.images import ImageStore
from ...state.graphs.materialization.materialize import Capture, materialize_graphs
from ...state.graphs.mismatch import GraphMismatch, Reason
from ...state.graphs.placement import Placement, place
from ...state.graphs.restoration.restore import GraphRestorer, RestoredGraphs, log_reasons
from ..torch.kv_cache import KV_CACHE
from .attempts import CHECK, UNPIN, Attempts
from .capture import CudaCapturer, CudaGraph
from .decode_graphs import DecodeGraphs
from .graph_memory import unnamed_ranges
from .placed_memory import PlacedMemory
from .static_inputs import INPUTS, OUTPUTS

logger = logging.getLogger(__name__)

KV_BLOCKS, _ANY = "kv blocks", "any"
_REFERENCE_BYTES = 1024  # how much of a row's logits is compared when a restored graph is checked
_PLACED_KINDS = (RangeKind.SLAB, RangeKind.WORKSPACE)


def key_of(size: int) -> str:
    return f"decode {size}"


class GraphState:
    """Materializes and restores the decode graphs of one engine.

    ``dump`` and ``materialize`` are for the process that has captured the graphs, and ``restore`` for one that has not.
    ``begin``, ``build`` and ``restore_sizes`` are the steps of ``restore``, for an engine that restores a few graphs at
    a time.
    """

    def __init__(self, model: DecoderModel, graphs: DecodeGraphs, memory: PlacedMemory) -> None:
        self._model = model
        self._graphs = graphs
        self._cache = graphs.cache
        self._memory = memory
        self._driver: CudaDriver = memory.driver
        self._placement: Placement | None = None
        self._stream: Any = None
        self._restorer: GraphRestorer | None = None
        self._triggered: list[CudaGraph] = []  # kept alive, because restored graphs use their kernels
        self.restored: RestoredGraphs | None = None

    def restore(self, data: Blueprints | bytes, *, validate: str = "ends") -> dict[int, Any]:
        """Restore all graphs that fit, and return them by batch size. The weights must be loaded.

        The reasons why others do not fit are logged once.
        """
        return self.restore_sizes(self.begin(data), validate=validate)

    def begin(self, data: Blueprints | bytes | memoryview) -> tuple[int, ...]:
        """Map the graphs' memory, begin to load kernel images, and return the sizes that the bundle has graphs for.

        The reasons why it has none for other sizes, or why none fits here, are logged once.
        """
        blueprints = self._without_pinned(data if isinstance(data, Blueprints) else decode_blueprints(data))
        self._stream = stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        restorer = GraphRestorer(
            self._driver,
            blueprints,
            stream=stream.cuda_stream,
            fingerprint=self.fingerprint() | self._kv_blocks_fact(blueprints.fingerprint.get(KV_BLOCKS) == _ANY),
            current_stream=lambda: torch.cuda.current_stream().cuda_stream,
            trigger=self._trigger,
        )
        sizes = (*self._graphs.first_sizes, *self._graphs.sizes)
        restorer.begin_loading([key_of(size) for size in sizes])  # beside the mapping of memory
        try:
            used = used_ranges(blueprints) if restorer.keys else set()
            wanted = [
                memory_range
                for n, memory_range in enumerate(blueprints.ranges)
                if n in used and memory_range.kind in _PLACED_KINDS
            ]
            placement = place(self._driver, wanted, placed={one.name: one.address for one in self._named()})
        except GraphMismatch as mismatch:
            restorer.restored.close()
            logger.warning("CUDA graphs are captured, not restored: %s", mismatch)
            return ()
        except BaseException:
            restorer.restored.close()
            raise
        self._placement = restorer.placement = placement  # the graphs' memory must live as long as they do
        torch.cuda.synchronize()
        self._restorer, self.restored = restorer, restorer.restored
        found, keys = set(restorer.keys), [key_of(size) for size in self._graphs.sizes]
        absent = [key for key in keys if key not in found]
        restorer.build(absent)  # only the reasons
        log_reasons(restorer.restored, absent)
        return tuple(size for size in self._graphs.sizes if key_of(size) in found)

    def build(self, sizes: Sequence[int]) -> None:
        """Load kernel images and build the graphs of these sizes, which needs no weights."""
        if self._restorer is not None:
            self._restorer.build([key_of(size) for size in sizes])

    def build_one(self, sizes: Sequence[int]) -> int:
        """Build the graph of one of these sizes, and return the size: the first whose kernel images are loaded."""
        keys = {key_of(size): size for size in sizes}
        return keys[self._restorer.build_one(list(keys))] if self._restorer is not None else sizes[0]

    def restore_sizes(self, sizes: Sequence[int], *, validate: str = "all") -> dict[int, Any]:
        """Build the graphs of these sizes unless ``build`` has, check them, and return those that fit by batch size.

        Call ``begin`` before this, and have the weights loaded. The reasons why graphs do not fit are logged once.
        """
        if self._restorer is None:
            return {}
        keys = {key_of(size): size for size in sizes}
        torch.cuda.synchronize()
        self._restorer.restore(list(keys), validate)
        restored = self._restorer.restored
        log_reasons(restored, keys)
        return {size: restored.graphs[key] for key, size in keys.items() if key in restored.graphs}

    def close(self) -> None:
        """Free the restored graphs with their kernels and memory, which must not be in use any more."""
        restored, self.restored, self._restorer = self.restored, None, None
        if restored is not None:
            restored.close()
        self._triggered.clear()
        placement, self._placement = self._placement, None
        if placement is not None:
            placement.close()

    def check(self, unchecked: Blueprints, attempts: Attempts) -> Blueprints:
        """Restore and replay every graph of a bundle, and return the bundle with those alone whose outputs are right.

        This is for an offline process that has captured nothing, so that a user's request is never the first to run a
        restored graph. Raises DeviceError if a graph breaks the context. ``attempts`` then says which one it was, and
        the next process leaves it out.
        """
        blueprints = attempts.without_ended(unchecked)
        self.begin(blueprints)
        wrong = {graph.key for graph in blueprints.graphs}
        for size in [size for size in self._graphs.sizes if key_of(size) in wrong]:
            with attempts.trying(CHECK, key_of(size)):
                wrong -= {key_of(right) for right in self.restore_sizes([size])}
        known = self.restored.reasons if self.restored is not None else {}
        unmapped = GraphMismatch(Reason.MEMORY, "its memory could not be mapped in a new process; the log says why")
        return blueprints.without({key: str(known.get(key, unmapped)) for key in wrong})

    def unpin(self, checked: Blueprints, second: Blueprints, attempts: Attempts) -> Blueprints:
        """Return the bundle with fewer graphs pinned to their captured addresses. Call ``check`` before this.

        A graph is pinned by words that two captures do not explain. Most of these are bytes that nothing reads, in
        structures that are passed by value. So each graph is built once more, with the bytes of the ``second`` capture
        and only its known pointers relocated. If it gives its stored outputs, no other word that differs matters.
        Raises DeviceError if one does matter so much that it breaks the context. The graph is in ``attempts`` then, and
        the next process leaves it pinned.
        """
        there = {one.name: one.address for one in second.ranges}
        others = {graph.key: graph.blob for graph in second.graphs}
        moved = {n for n, one in enumerate(checked.ranges) if there.get(one.name, one.address) != one.address}
        tried = [graph for graph in checked.graphs if graph.pinned and moved.issuperset(graph.pinned)]
        tried = [graph for graph in tried if len(others.get(graph.key, b"")) == len(graph.blob)]
        ended = attempts.ended(UNPIN)
        tried = [graph for graph in tried if graph.key not in ended]
        if not tried or self._placement is None:
            return checked
        variants = tuple(replace(graph, blob=others[graph.key], pinned=()) for graph in tried)
        restorer = GraphRestorer(
            self._driver,
            replace(checked, graphs=variants),
            placement=self._placement,
            stream=self._stream.cuda_stream,
            fingerprint=checked.fingerprint,
        )
        for graph in variants:
            with attempts.trying(UNPIN, graph.key):
                restorer.build([graph.key])
                restorer.verify([graph.key])
        free = set(restorer.restored.graphs)
        restorer.restored.close()
        logger.info("%d of %d pinned graphs can be at other addresses, too", len(free), len(tried))
        graphs = (replace(graph, pinned=()) if graph.key in free else graph for graph in checked.graphs)
        return replace(checked, graphs=tuple(graphs))

    def _trigger(self, key: str) -> int:
        sizes = {key_of(size): size for size in self._graphs.sizes}
        # It has a pool of its own, since what is captured here is never run.
        capturer = CudaCapturer(self._memory.device, keep_graph=True, instantiate=False)
        layer = self._graphs.capture_first_layer(sizes[key], capturer)
        assert isinstance(layer, CudaGraph)
        self._triggered.append(layer)
        return int(layer.captured.raw_cuda_graph())

    def dump(self, capturer: CudaCapturer, images: ImageStore) -> Blueprints:
        """Dump all captured graphs, which need ``keep_graph``. ``images``: those of all modules loaded so far."""
        handles = {key_of(size): graph.captured.raw_cuda_graph() for size, graph in self._captured().items()}
        dump = dump_graphs(self._driver, handles, self.ranges(capturer), images=images)
        logger.info("read %d nodes of %d graphs", sum(len(graph.nodes) for graph in dump.graphs), len(dump.graphs))
        return dump

    def materialize(
        self,
        capturer: CudaCapturer,
        images: ImageStore,
        second: Blueprints | None,
    ) -> Blueprints:
        """Make blueprints of the captured graphs.

        ``images``: those of all modules loaded so far. ``second``: the dump of a process whose memory lies at other
        addresses.
        """
        dump = self.dump(capturer, images)
        numbers = {memory_range.name: number for number, memory_range in enumerate(dump.ranges)}
        captured = self._captured()
        stream = capturer.stream.cuda_stream
        inputs = {key_of(size): self._inputs(size, numbers[INPUTS]) for size in captured}
        outputs = {key_of(size): self._outputs(size, numbers[OUTPUTS]) for size in captured}
        launches = {key_of(size): _launch(capturer, graph) for size, graph in captured.items()}
        capture = Capture(
            launches,
            inputs,
            outputs,
            stream,
            images,
            fingerprint=self.fingerprint() | self._kv_blocks_fact(second is not None and self._resized(second)),
            reads_host=False,
        )
        return materialize_graphs(self._driver, dump, capture, second=second)

    def fingerprint(self) -> dict[str, str]:
        """Return the facts that must be equal when graphs are restored: what kernels, sizes and offsets depend on."""
        config = hashlib.sha256(repr(self._model.config).encode()).hexdigest()[:16]
        named = self._memory.ranges.items()
        sizes = {f"range.{name}": str(memory_range.size) for name, memory_range in named if name != KV_CACHE}
        own = {"torch": torch.__version__, "model": config, "rows": str(self._graphs.sizes[-1]), **sizes}
        return fingerprint(self._driver, own)

    def ranges(self, capturer: CudaCapturer) -> list[MemoryRange]:
        """Return all device memory that graphs may point into: named ranges, their pool, and torch's other memory."""
        known = self._named()
        if capturer.memory is not None:
            known.append(capturer.memory.memory_range)
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return [*known, *unnamed_ranges(known, segments, capturer.pool)]

    def _named(self) -> list[MemoryRange]:
        """Return the named memory, with a range for each layer's keys and one for its values.

        A graph depends on where these begin, and on nothing else of the KV cache, unless it contains the number of
        blocks.
        """
        named = [memory_range for memory_range in self._memory.ranges.values() if memory_range.name != KV_CACHE]
        for layer, parts in self._cache.layers.items():
            for kind, part in zip(("keys", "values"), parts, strict=True):
                name = f"{KV_CACHE} {layer} {kind}"
                named.append(MemoryRange(name, RangeKind.NAMED, part.data_ptr(), part.nbytes))
        return named

    def _resized(self, other: Blueprints) -> bool:
        """Return whether every part of the KV cache had another size when ``other`` was captured."""
        sizes = {memory_range.name: memory_range.size for memory_range in other.ranges}
        parts = [memory_range for memory_range in self._named() if memory_range.name.startswith(KV_CACHE)]
        return all(sizes.get(part.name, part.size) != part.size for part in parts)

    def _kv_blocks_fact(self, proved: bool) -> dict[str, str]:
        """Return the fingerprint's entry for the KV cache's size: "any" if it is ``proved`` not to matter.

        Two captures with caches of different sizes prove it.
        """
        return {KV_BLOCKS: _ANY if proved else str(len(self._cache.layers[0][0]))}

    def _without_pinned(self, blueprints: Blueprints) -> Blueprints:
        """Leave out graphs with unexplained words if the KV cache has another size than when they were captured."""
        if not self._resized(blueprints):
            return blueprints
        why = f"{Reason.ADDRESS}: captured with a KV cache of another size, which something in it may depend on"
        return blueprints.without({graph.key: why for graph in blueprints.graphs if graph.pinned})

    def _captured(self) -> dict[int, CudaGraph]:
        return {size: graph for size, graph in self._graphs.graphs.items() if isinstance(graph, CudaGraph)}

    def _inputs(self, size: int, memory_range: int) -> tuple[Piece, ...]:
        self._graphs.inputs.fill_reference(size, self._model.config.vocab_size)
        torch.cuda.synchronize()
        return tuple(Piece(memory_range, offset, data) for offset, data in self._graphs.inputs.pieces(size))

    def _outputs(self, size: int, memory_range: int) -> tuple[Piece, ...]:
        row_bytes = self._graphs.inputs.logits[0].nbytes
        rows = sorted({*range(min(size, self._graphs.inputs.distinct_rows)), size - 1})
        return tuple(Piece(memory_range, row * row_bytes, bytes(min(_REFERENCE_BYTES, row_bytes))) for row in rows)


def _launch(capturer: CudaCapturer, graph: CudaGraph) -> Any:
    def launch() -> None:
        with torch.cuda.stream(capturer.stream):
            graph.replay()

    return launch


def summary(blueprints: Blueprints) -> Mapping[str, object]:
    """Return counts of what was materialized, for a report."""
    return {
        "graphs": len(blueprints.graphs),
        "nodes": sum(len(graph.nodes) for graph in blueprints.graphs),
        "pointers": sum(len(graph.relocations) for graph in blueprints.graphs),
        "pinned": sum(bool(graph.pinned) for graph in blueprints.graphs),
        "images": len(blueprints.images),
        "image_bytes": sum(map(len, blueprints.images.values())),
        "contents_bytes": sum(len(piece.data) for piece in blueprints.contents),
        "refused": dict(blueprints.refused),
    }
