"""Restores graphs from blueprints, without capturing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ....errors import DeviceError, StateError
from ..blueprint import Blueprints, GraphBlueprint, Piece, RangeKind
from ..driver import CudaDriver, CudaError
from ..fingerprint import compare
from ..mismatch import GraphMismatch, Reason
from ..placement import Placement
from ..replay import Replayer
from .build import build
from .kernels import KernelFinder, KernelHandle, Trigger

logger = logging.getLogger(__name__)

_REPLAYS = 2


class RestoredGraph:
    """One executable graph. ``replay`` launches it on the stream that is current at that moment."""

    def __init__(self, driver: CudaDriver, handle: int, stream: Callable[[], int]) -> None:
        self._driver = driver
        self._handle = handle
        self._stream = stream

    def replay(self) -> None:
        self._driver.call("cuGraphLaunch", self._handle, self._stream())

    def launch(self, stream: int) -> None:
        self._driver.call("cuGraphLaunch", self._handle, stream)

    def close(self) -> None:
        handle, self._handle = self._handle, 0
        if handle:
            self._driver.result("cuGraphExecDestroy", handle)


class RestoredGraphs:
    """Graphs that were restored, and why others were not.

    ``graphs``: key → the restored graph. ``reasons``: key → why a graph has to be captured. A context manager. Closing
    destroys the graphs and unloads their kernels; their memory belongs to the placement.
    """

    def __init__(self, finder: KernelFinder | None = None) -> None:
        self.graphs: dict[str, RestoredGraph] = {}
        self.reasons: dict[str, GraphMismatch] = {}
        self._finder = finder

    def __enter__(self) -> RestoredGraphs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reject_all(self, mismatch: GraphMismatch) -> None:
        for key, graph in self.graphs.items():
            graph.close()
            self.reasons[key] = mismatch
        self.graphs.clear()

    def close(self) -> None:
        while self.graphs:
            self.graphs.popitem()[1].close()
        if self._finder is not None:
            self._finder.close()


def restore_graphs(
    driver: CudaDriver,
    blueprints: Blueprints | bytes,
    placement: Placement,
    *,
    keys: Sequence[str],
    stream: int,
    fingerprint: Mapping[str, str],
    current_stream: Callable[[], int] | None = None,
    trigger: Trigger | None = None,
    validate: str = "ends",
) -> RestoredGraphs:
    """Restore the graphs of these keys that fit here. Never raises for a bad bundle: the reason is logged once.

    ``placement``: where the memory ranges are now (``place``). The weights' bytes, and all else that the reference
    outputs depend on, must be there already. ``stream``: for uploads and validation. ``current_stream``: the stream for
    ``replay``, by default the same. ``trigger``: captures a first layer; called only for a kernel that is in no saved
    image. ``validate``: which graphs to replay and compare with their stored outputs: "all", "ends" (the first and the
    last of ``keys``) or "none". One difference rejects all graphs.

    Raises DeviceError when a replay breaks the context. Then nothing works in this process any more, and the next one
    has to start without the bundle.
    """
    try:
        loaded = Blueprints.load(blueprints) if isinstance(blueprints, bytes) else blueprints
        compare(loaded.fingerprint, fingerprint)
    except StateError as error:
        return _rejected(keys, GraphMismatch(Reason.CORRUPT, str(error)))
    except GraphMismatch as mismatch:
        return _rejected(keys, mismatch)
    finder = KernelFinder(driver, loaded, trigger)
    restored = RestoredGraphs(finder)
    known = {graph.key: graph for graph in loaded.graphs}
    for key in keys:
        if key not in known:
            absent = f"{Reason.ABSENT}: it was not materialized"
            restored.reasons[key] = GraphMismatch.parse(loaded.refused.get(key, absent))
            continue
        try:
            handle = _restore(driver, loaded, known[key], finder, placement, stream)
            restored.graphs[key] = RestoredGraph(driver, handle, current_stream or (lambda: stream))
        except GraphMismatch as mismatch:
            restored.reasons[key] = mismatch
        except DeviceError as error:
            restored.reasons[key] = GraphMismatch(Reason.DRIVER_CALL, str(error))
    if restored.graphs:
        try:
            wrong = _validate(driver, loaded, restored, finder, placement, stream, validate)
        except GraphMismatch as mismatch:
            wrong = mismatch
        if wrong is not None:
            restored.reject_all(wrong)
    return _logged(restored)


def _rejected(keys: Sequence[str], mismatch: GraphMismatch) -> RestoredGraphs:
    restored = RestoredGraphs()
    restored.reasons = dict.fromkeys(keys, mismatch)
    return _logged(restored)


def _logged(restored: RestoredGraphs) -> RestoredGraphs:
    reasons = Counter(str(mismatch) for mismatch in restored.reasons.values())
    if reasons:
        first, _ = reasons.most_common(1)[0]
        more = f" (and {len(reasons) - 1} other reasons)" if len(reasons) > 1 else ""
        logger.warning("%d CUDA graphs are captured, not restored: %s%s", len(restored.reasons), first, more)
    return restored


def _restore(
    driver: CudaDriver,
    blueprints: Blueprints,
    graph: GraphBlueprint,
    finder: KernelFinder,
    placement: Placement,
    stream: int,
) -> int:
    _check_pins(blueprints, graph, placement)
    kernels = [KernelHandle(0, 0)] * len(blueprints.kernels)
    for number in {node.kernel for node in graph.nodes if node.kernel >= 0}:
        kernels[number] = finder.handle(number, graph.key)
    addresses = []
    for relocation in graph.relocations:
        memory_range = blueprints.ranges[relocation.memory_range]
        if memory_range.kind == RangeKind.MODULE:
            variable = finder.variable(memory_range.name)
            if variable is None:
                raise GraphMismatch(
                    Reason.MEMORY_RANGE, f"the variable {memory_range.name.partition(':')[2]} is in no loaded image"
                )
            addresses.append(variable + relocation.offset)
        else:
            addresses.append(placement.address(memory_range, relocation.offset))
    return build(driver, blueprints, graph, kernels=kernels, addresses=addresses, stream=stream)


def _check_pins(blueprints: Blueprints, graph: GraphBlueprint, placement: Placement) -> None:
    for number in graph.pinned:
        memory_range = blueprints.ranges[number]
        address = placement.addresses.get(memory_range.name)
        if address != memory_range.address:
            where = "nowhere" if address is None else f"{address:#x}"
            raise GraphMismatch(
                Reason.ADDRESS, f"expected {memory_range.name} at {memory_range.address:#x}, found it {where}"
            )


def _validate(
    driver: CudaDriver,
    blueprints: Blueprints,
    restored: RestoredGraphs,
    finder: KernelFinder,
    placement: Placement,
    stream: int,
    validate: str,
) -> GraphMismatch | None:
    """Write permanent contents, then replay: MEDUSA §4's validation, here before the first token."""

    def at(piece: Piece) -> int:
        memory_range = blueprints.ranges[piece.memory_range]
        if memory_range.kind == RangeKind.MODULE:
            return (finder.variable(memory_range.name) or 0) + piece.offset
        return placement.address(memory_range, piece.offset)

    replayer = Replayer(driver, at, stream)
    keys = list(restored.graphs)
    if validate != "all":
        keys = list(dict.fromkeys((keys[0], keys[-1]))) if validate == "ends" else []
    try:
        replayer.write(piece for piece in blueprints.contents if not _unloaded(blueprints, piece, finder))
        for key in keys * _REPLAYS:
            blueprint, graph = blueprints.graph(key), restored.graphs[key]
            found = replayer.run(partial(graph.launch, stream), blueprint.inputs, blueprint.outputs)
            if found != blueprint.outputs:
                return GraphMismatch(Reason.OUTPUT, f"a replay of {key} did not give its stored outputs")
    except CudaError as error:
        if error.sticky:
            raise DeviceError(f"a restored CUDA graph broke the context ({error}); start with --state none") from error
        return GraphMismatch(Reason.DRIVER_CALL, str(error))
    return None


def _unloaded(blueprints: Blueprints, piece: Piece, finder: KernelFinder) -> bool:
    """Whether a piece is in a variable of an image that no graph has needed here."""
    memory_range = blueprints.ranges[piece.memory_range]
    return memory_range.kind == RangeKind.MODULE and finder.variable(memory_range.name) is None
