"""Translates between vLLM's graphs and a state bundle's blueprints.

It works as for the torch engine, except for memory: vLLM's stays where torch has put it, and graphs are relocated to
it. Only their pool, and workspaces without a name, are placed here.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from medusa_runtime.engine.gpu.attempts import CHECK, Attempts
from medusa_runtime.engine.gpu.graph_memory import Segments, unnamed_ranges
from medusa_runtime.engine.gpu.graph_pool import GraphPool
from medusa_runtime.errors import DeviceError
from medusa_runtime.state.graphs import (
    Blueprints,
    Capture,
    CudaDriver,
    GraphMismatch,
    GraphRestorer,
    ImageStore,
    KernelFinder,
    MemoryRange,
    Piece,
    Placement,
    RangeKind,
    Reason,
    Trigger,
    dump_graphs,
    fingerprint,
    materialize_graphs,
    place,
)
from medusa_runtime.state.graphs.blob_format import decode_blueprints
from medusa_runtime.state.graphs.compiled import used_ranges
from medusa_runtime.state.graphs.driver import STICKY, CudaError
from medusa_runtime.state.graphs.fingerprint import check_fingerprint
from medusa_runtime.state.graphs.replay import Replayer
from medusa_runtime.state.graphs.restoration.restore import log_reasons
from torch import Tensor
from vllm import __version__
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from .graphs import RestoredDecodeGraphs, key_of
from .memory import named_ranges
from .piecewise import (
    ResultBuilder,
    Results,
    batch_of,
    compiled_functions,
    encode_results,
    entry_of,
    is_last,
    piece_key,
    put_entry,
)
from .recording import HIDDEN, Recording, is_input

logger = logging.getLogger(__name__)

KV_BYTES = "kv_cache_bytes"
_REFERENCE_BYTES = 1024  # of a row's hidden states
_REFERENCE_ROWS = 16
_PLACED = (RangeKind.SLAB, RangeKind.WORKSPACE)


def materialize_obstacle(runner: Any, manager: Any) -> str | None:
    """Return why this configuration's graphs are captured at each start; None if they can be materialized."""
    if not (manager.is_first_pp_rank and manager.is_last_pp_rank) or manager.tp_size > 1 or manager.dp_size > 1:
        return "the model is spread over several GPUs"
    if runner.lora_config is not None:
        return "there are LoRA adapters"
    if getattr(runner, "use_aux_hidden_state_outputs", False) or getattr(runner, "speculator", None) is not None:
        return "there is a speculator"
    return None


def fingerprint_of(driver: CudaDriver, runner: Any) -> dict[str, str]:
    """Return facts that must be equal at a restore. Sizes of memory are compared separately, for each range."""
    config = runner.model_config
    model = hashlib.sha256(repr(config.hf_config).encode()).hexdigest()[:16]
    own = {"torch": torch.__version__, "vllm": __version__, "model": model, "dtype": str(config.dtype)}
    return fingerprint(driver, own)


def begin_loading(driver: CudaDriver, runner: Any, blueprints: Blueprints) -> KernelFinder | None:
    """Begin to load a bundle's kernels in threads, before there is a KV cache; None if they cannot be for this start.

    What is wrong with them is said when they are restored.
    """
    recorded, finder = dict(blueprints.fingerprint), KernelFinder(driver, blueprints)
    recorded.pop(KV_BYTES, None)
    try:
        check_fingerprint(recorded, fingerprint_of(driver, runner))
        finder.begin_loading()
    except (GraphMismatch, DeviceError, RuntimeError):  # the latter for want of threads
        finder.close()
        return None
    return finder


class _Restored(NamedTuple):
    """The parts of a restore that must live as long as its graphs."""

    blueprints: Blueprints
    placement: Placement
    restorer: GraphRestorer
    stream: Any


class VllmGraphState:
    """One worker's graphs.

    ``dump`` and ``materialize`` are for the process that captured them, ``restore`` for one that did not.
    """

    def __init__(
        self,
        driver: CudaDriver,
        runner: Any,
        manager: Any,
        *,
        segments: Callable[[], Segments] | None = None,
        device: str = "cuda",
        pool: GraphPool | None = None,
    ) -> None:
        """``pool`` is the pool in which the graphs were captured, if it is not torch's own."""
        self._driver, self._runner, self._manager = driver, runner, manager
        self._pool = pool
        self._segments = segments or torch.cuda.memory_snapshot
        self._device = device
        self._restored: _Restored | None = None
        self._validate = "ends"
        self._attempts: Attempts | None = None
        self._addresses: dict[str, int] = {}  # of named and placed memory, since ``restore``
        self.verified: set[str] = set()  # keys of graphs that were validated one by one, and gave their outputs
        self.reasons: dict[str, GraphMismatch] = {}  # why others are captured

    def named(self) -> list[MemoryRange]:
        return named_ranges(self._runner, lambda tensor: tensor.device.type == self._device)

    def read(self, ranges: Iterable[MemoryRange]) -> tuple[tuple[MemoryRange, bytes], ...]:
        """Return the contents of ranges behind all work that has begun, on whichever stream. No capture may run."""
        self._driver.call("cuCtxSynchronize")  # a copy waits for no stream of torch's
        return tuple((one, self._driver.read(one.address, one.size)) for one in ranges)

    def dump(self, images: ImageStore) -> Blueprints:
        """Read all captured graphs as they are. ``images`` are those of all modules loaded so far."""
        handles = {key_of(batch): int(graph.raw_cuda_graph()) for batch, graph in self._full()}
        handles |= {key: int(entry.cudagraph.raw_cuda_graph()) for key, (_, _, entry) in self._pieces().items()}
        known = self.named()
        if self._pool is not None:
            pool = self._pool.memory_range
            inside = range(pool.address, pool.address + pool.size)
            known = [pool, *(memory_range for memory_range in known if memory_range.address not in inside)]
        ranges = [*known, *unnamed_ranges(known, self._segments(), self._manager.pool)]
        return dump_graphs(self._driver, handles, ranges, images=images)

    def materialize(
        self,
        recording: Recording,
        images: ImageStore,
        second: Blueprints | None,
        *,
        stream: Any,
    ) -> Blueprints:
        """Make blueprints. ``second`` is the dump of another process, in which everything has another address."""
        dump = self.dump(images)
        numbers = {memory_range.name: number for number, memory_range in enumerate(dump.ranges)}
        full = dict(self._full())

        def inputs_of(batch: BatchExecutionDescriptor) -> tuple[Piece, ...]:
            known = [
                (memory_range, data) for memory_range, data in recording.inputs[batch] if memory_range.name in numbers
            ]
            return tuple(Piece(numbers[memory_range.name], 0, data) for memory_range, data in known)

        read = {key_of(batch): inputs_of(batch) for batch in full}
        launches = {key_of(batch): partial(_launch, graph.replay, stream) for batch, graph in full.items()}
        outputs = {key_of(batch): self._outputs(batch, numbers[HIDDEN]) for batch in full}
        results, refused = {}, {}
        for key, (batch, wrapper, entry) in self._pieces().items():
            try:
                results[key] = encode_results(entry.output, dump.ranges)
            except GraphMismatch as mismatch:
                refused[key] = str(mismatch)
                continue
            if is_last(wrapper):
                launches[key] = partial(_launch, partial(recording.forwards[batch], CUDAGraphMode.PIECEWISE), stream)
                read[key] = inputs_of(batch)
                outputs[key] = tuple(_output(place, batch.num_tokens) for place in _tensors(results[key]))
        dump = replace(dump.without(refused), results=results)
        capture = Capture(
            launches,
            read,
            outputs,
            stream.cuda_stream,
            images,
            fingerprint=fingerprint_of(self._driver, self._runner) | {KV_BYTES: str(self._kv_bytes())},
        )
        return _without_stale_state(materialize_graphs(self._driver, dump, capture, second=second))

    def restore(
        self,
        data: Blueprints | bytes,
        *,
        trigger: Trigger | None = None,
        finder: KernelFinder | None = None,
        validate: str = "ends",
        attempts: Attempts | None = None,
    ) -> RestoredDecodeGraphs | None:
        """Restore the full graphs that fit, and log once why others do not.

        ``finder`` has begun to load these blueprints' kernels, if that was possible before. ``validate`` is as in
        ``restore_graphs``, and also for the batches of piecewise graphs. With ``attempts``, each graph or batch is
        tried out alone instead, and one that differs rejects no other. Raises DeviceError if the context is broken.
        """
        self._validate, self._attempts = validate, attempts
        blueprints = data if isinstance(data, Blueprints) else decode_blueprints(data)
        with ExitStack() as held:  # without graphs, vLLM captures, which needs as much memory
            if finder is not None:
                held.callback(finder.close)
            restored = self._restore(blueprints, held, trigger, finder)
            if restored is not None:
                held.pop_all()
            return restored

    def _restore(
        self, blueprints: Blueprints, held: ExitStack, trigger: Trigger | None, finder: KernelFinder | None
    ) -> RestoredDecodeGraphs | None:
        used = used_ranges(blueprints)
        recorded = {memory_range.name: memory_range for n, memory_range in enumerate(blueprints.ranges) if n in used}
        full = self._manager._capture_descs.get(CUDAGraphMode.FULL, [])
        hidden = self._hidden_states(recorded.get(HIDDEN), full)
        if hidden is None:
            return None
        here = {memory_range.name: memory_range for memory_range in self.named()}
        here[HIDDEN] = MemoryRange(HIDDEN, RangeKind.NAMED, hidden.data_ptr(), hidden.nbytes)
        # A range of another size has other strides or rows. It counts as missing, which each graph's reason will say.
        placed = {
            name: here[name].address
            for name, memory_range in recorded.items()
            if name in here and memory_range.size == here[name].size
        }
        wanted = [memory_range for memory_range in recorded.values() if memory_range.kind in _PLACED]
        placement = held.enter_context(place(self._driver, wanted, placed=placed))
        self._addresses = {name: memory_range.address for name, memory_range in here.items()} | placement.addresses
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        before = self.read([one for name, one in here.items() if name in recorded and is_input(one)])
        restorer = GraphRestorer(
            self._driver,
            blueprints,
            placement=placement,
            stream=stream.cuda_stream,
            fingerprint=fingerprint_of(self._driver, self._runner) | {KV_BYTES: str(self._kv_bytes())},
            current_stream=lambda: torch.cuda.current_stream().cuda_stream,
            trigger=trigger,
            finder=finder,
        )
        restored = held.enter_context(restorer.restored)
        keys = [key_of(batch) for batch in full]
        restorer.begin_loading(keys)
        if self._attempts is not None:
            restorer.build(keys)
            self._verify_each(restorer, keys, self._attempts)
        else:
            restorer.restore(keys, self._validate)
        log_reasons(restored)
        self.reasons |= restored.reasons
        for memory_range, contents in before:
            self._driver.write(memory_range.address, contents)
        if not restored.graphs:
            return None
        self._restored = _Restored(blueprints, placement, restorer, stream)
        return RestoredDecodeGraphs(restored.graphs, hidden)

    def restore_pieces(self, create_forward: Callable[..., Any]) -> list[BatchExecutionDescriptor]:
        """Restore piecewise graphs, and return the batches whose graphs are all there.

        Call it after ``restore``, and after a first forward has made the compiled functions. ``create_forward`` is
        vLLM's function that makes the forward of a batch.
        """
        if self._restored is None:
            return []
        blueprints, placement, restorer, _ = self._restored
        wrappers = compiled_functions()
        outputs = ResultBuilder(blueprints.ranges, placement.addresses, self._runner.device)
        batches = self._manager._capture_descs.get(CUDAGraphMode.PIECEWISE, [])
        pieces = {batch: [piece_key(batch, name) for name in wrappers] for batch in batches}
        keys = [key for batch in batches for key in pieces[batch]]
        restorer.build(keys)
        restored = restorer.restored
        log_reasons(restored, keys)
        whole = [batch for batch in batches if all(key in restored.graphs for key in pieces[batch])]
        try:
            for batch in whole:
                for key, wrapper in zip(pieces[batch], wrappers.values(), strict=True):
                    put_entry(wrapper, batch, restored.graphs[key], outputs.build(blueprints.results[key]))
            wrong = self._wrong_batches(whole, create_forward)
        except BaseException:
            for batch in whole:
                for wrapper in wrappers.values():
                    put_entry(wrapper, batch, None)
            raise
        for batch, mismatch in wrong.items():
            for wrapper in wrappers.values():
                put_entry(wrapper, batch, None)
            restored.reject(pieces[batch], mismatch)
        self.reasons |= restored.reasons
        right = [batch for batch in whole if batch not in wrong]
        if self._attempts is not None:
            self.verified.update(key for batch in right for key in pieces[batch])
        return right

    def context_is_lost(self) -> bool:
        """Return whether graphs were restored, and the context is broken. Call it in the engine's thread."""
        return self._restored is not None and self._driver.result("cuCtxSynchronize") in STICKY

    def is_where_captured(self, memory_range: MemoryRange) -> bool:
        """Return whether a range of a bundle is at its captured address in this process. ``restore`` comes first."""
        return self._addresses.get(memory_range.name) == memory_range.address

    def _verify_each(self, restorer: GraphRestorer, keys: Sequence[str], attempts: Attempts) -> None:
        for key in keys:
            try:
                with attempts.trying(CHECK, key):
                    restorer.verify([key])
            except DeviceError as error:
                raise DeviceError(f"{key}: {error}") from error.__cause__
        self.verified.update(restorer.restored.graphs)

    def _wrong_batches(
        self, batches: Sequence[BatchExecutionDescriptor], create_forward: Callable[..., Any]
    ) -> dict[BatchExecutionDescriptor, GraphMismatch]:
        """Validate batches of piecewise graphs. With attempts, return those that are wrong.

        Otherwise a difference is raised.
        """
        attempts, wrong = self._attempts, {}
        if attempts is None and self._validate == "ends":
            batches = list(dict.fromkeys((*batches[:1], *batches[-1:])))
        for batch in batches if attempts is not None or self._validate != "none" else ():
            forward = create_forward(batch, warmup=True)
            if attempts is None:
                self._check(batch, forward)
                continue
            with attempts.trying(CHECK, *(piece_key(batch, name) for name in compiled_functions())):
                try:
                    self._check(batch, forward)
                except GraphMismatch as mismatch:
                    wrong[batch] = mismatch
        return wrong

    def _check(self, batch: BatchExecutionDescriptor, forward: Callable[[CUDAGraphMode], None]) -> None:
        """Validate (MEDUSA §4) a forward through all pieces of a batch: two runs against the stored outputs.

        Raises GraphMismatch (OUTPUT) when they differ, and DeviceError when the context is broken.
        """
        assert self._restored is not None
        blueprints, placement, _, stream = self._restored

        def at(piece: Piece) -> int:
            return placement.addresses[blueprints.ranges[piece.memory_range].name] + piece.offset

        replayer = Replayer(self._driver, at, stream.cuda_stream)
        last = [graph for graph in blueprints.graphs if batch_of(graph.key) == key_of(batch) and graph.outputs]
        launch = partial(_launch, partial(forward, CUDAGraphMode.PIECEWISE), stream)
        try:
            right = [replayer.run(launch, graph.inputs, graph.outputs) == graph.outputs for graph in last * 2]
        except Exception as error:
            code = self._driver.result("cuCtxSynchronize")
            if code in STICKY:
                lost = CudaError("cuCtxSynchronize", code, str(error))
                raise DeviceError(
                    f"{key_of(batch)}: restored CUDA graphs broke the context ({error}); use --state none"
                ) from lost
            raise
        if not right or not all(right):
            raise GraphMismatch(Reason.OUTPUT, f"a forward of {key_of(batch)} did not give its stored outputs")

    def _pieces(self) -> dict[str, tuple[BatchExecutionDescriptor, Any, Any]]:
        """Return, by key, each piece's batch, wrapper and entry. Empty if functions cannot be told apart.

        The smallest batch is left out, since vLLM captures it at each start.
        """
        try:
            wrappers = compiled_functions()
        except GraphMismatch as mismatch:
            logger.warning("piecewise CUDA graphs are captured each time: %s", mismatch)
            return {}
        return {
            piece_key(batch, name): (batch, wrapper, entry)
            for batch in self._manager._capture_descs.get(CUDAGraphMode.PIECEWISE, [])[:-1]
            for name, wrapper in wrappers.items()
            if (entry := entry_of(wrapper, batch)) is not None
        }

    def _hidden_states(
        self, memory_range: MemoryRange | None, full: Sequence[BatchExecutionDescriptor]
    ) -> Tensor | None:
        """Allocate the tensor that vLLM allocates in its first warm-up, with the rows of the largest batch."""
        if memory_range is None or not full:
            return None
        dtype, rows = self._runner.model_config.dtype, max(batch.num_tokens for batch in full)
        width, rest = divmod(memory_range.size, rows * dtype.itemsize)
        if rest:
            detail = f"{HIDDEN} has {memory_range.size} bytes for batches of up to {rows}"
            raise GraphMismatch(Reason.LIBRARY, detail)
        return torch.empty(rows, width, dtype=dtype, device=self._runner.device)

    def _kv_bytes(self) -> int:
        caches = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in self._runner.kv_caches}
        return sum(storage.nbytes() for storage in caches.values())

    def _full(self) -> list[tuple[BatchExecutionDescriptor, Any]]:
        listed = [(batch, graph) for batch, graph in self._manager.graphs.items() if batch.num_ubatches == 1]
        return [(batch, graph) for batch, graph in listed if batch.cg_mode == CUDAGraphMode.FULL]

    def _outputs(self, batch: BatchExecutionDescriptor, memory_range: int) -> tuple[Piece, ...]:
        row_bytes = self._manager.hidden_states[0].nbytes
        rows = sorted({*range(min(batch.num_tokens, _REFERENCE_ROWS)), batch.num_tokens - 1})
        return tuple(Piece(memory_range, row * row_bytes, bytes(min(_REFERENCE_BYTES, row_bytes))) for row in rows)


def _launch(run: Callable[[], object], stream: Any) -> None:
    with torch.cuda.stream(stream), torch.inference_mode():
        run()


def _tensors(results: Results) -> list[list[Any]]:
    """Return the [range, offset, dtype, shape, strides] of each tensor in a function's results."""
    if not isinstance(results, list):
        return []
    if results[0] == "tensor":
        return [results[1:]]
    return [place for result in results[1:] for place in _tensors(result)]


def _output(place: list[Any], rows: int) -> Piece:
    """Return the place of the batch's last row, or the start of a result that has no rows."""
    memory_range, offset, dtype, shape, strides = place
    size = getattr(torch, dtype).itemsize
    row = (rows - 1) * strides[0] * size if shape and shape[0] >= rows else 0
    width = (shape[-1] if shape else 1) * size
    return Piece(memory_range, offset + row, bytes(min(_REFERENCE_BYTES, width)))


def _without_stale_state(blueprints: Blueprints) -> Blueprints:
    """Refuse all graphs if one needs the contents of a workspace, and drop inputs that no graph reads.

    Each step may write a workspace anew, at an address that is not known here.
    """
    for piece in blueprints.contents:
        memory_range = blueprints.ranges[piece.memory_range]
        if memory_range.kind == RangeKind.WORKSPACE:
            why = f"{Reason.CONTENTS}: they read {memory_range.name}, which has no name and may change with each step"
            refused = blueprints.without({graph.key: why for graph in blueprints.graphs})
            return replace(refused, contents=(), images={})
    read: defaultdict[str, set[int]] = defaultdict(set)
    for graph in blueprints.graphs:
        read[batch_of(graph.key)].update(relocation.memory_range for relocation in graph.relocations)
    graphs = []
    for graph in blueprints.graphs:
        inputs = tuple(piece for piece in graph.inputs if piece.memory_range in read[batch_of(graph.key)])
        graphs.append(replace(graph, inputs=inputs))
    return replace(blueprints, graphs=tuple(graphs))


__all__ = ["KV_BYTES", "VllmGraphState", "begin_loading", "materialize_obstacle"]
