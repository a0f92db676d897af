"""Restore graphs from blueprints, without capturing them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

from ....errors import DeviceError, StateError
from ..blob_format import decode_blueprints
from ..blueprint import Blueprints, GraphBlueprint, MemoryRange, Piece, RangeKind
from ..compiled import NotCompiledError, Used
from ..driver import CudaDriver, CudaError
from ..fingerprint import check_fingerprint
from ..mismatch import GraphMismatch, Reason
from ..placement import Placement
from ..replay import Replayer
from .build import GraphBuilder
from .kernels import KernelFinder, Trigger, image_of

logger = logging.getLogger(__name__)

_REPLAYS = 2


class RestoredGraph:
    """One executable graph. ``replay`` launches it on the stream that ``stream`` then returns."""

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
    """The restored graphs, by key (``graphs``), and the reasons why others must be captured (``reasons``).

    A context manager. Closing it destroys the graphs and unloads their kernels. Their memory belongs to the placement.
    """

    def __init__(self, finder: KernelFinder | None = None) -> None:
        self.graphs: dict[str, RestoredGraph] = {}
        self.reasons: dict[str, GraphMismatch] = {}
        self._finder = finder

    def __enter__(self) -> RestoredGraphs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reject(self, keys: Sequence[str], mismatch: GraphMismatch) -> None:
        for key in keys:
            self.graphs.pop(key).close()
            self.reasons[key] = mismatch

    def close(self) -> None:
        while self.graphs:
            self.graphs.popitem()[1].close()
        if self._finder is not None:
            self._finder.close()


class _Needs(NamedTuple):
    """What a graph uses, and the digests of the kernel images among it."""

    used: Used
    images: tuple[str, ...]


class GraphRestorer:
    """Restores the graphs of a bundle, a few at a time: the first before requests are served, the others in idle times.

    ``placement`` says where the memory ranges are now (see ``place``), and may be set later, before the first graph is
    built. ``stream`` is for uploads and validation, and ``current_stream`` returns the stream for ``replay``, which by
    default is the same. ``trigger`` captures a first layer, and is called only for a kernel that is in no saved image.
    ``finder`` is one that has begun to load the bundle's images; ``restored`` closes it.
    A bad bundle never raises an error: the reason is in ``restored``, for each graph.
    """

    builders = 3  # how many threads build graphs

    def __init__(
        self,
        driver: CudaDriver,
        blueprints: Blueprints | bytes | memoryview,
        *,
        stream: int,
        fingerprint: Mapping[str, str],
        placement: Placement | None = None,
        current_stream: Callable[[], int] | None = None,
        trigger: Trigger | None = None,
        finder: KernelFinder | None = None,
    ) -> None:
        self._driver, self._stream = driver, stream
        self.placement = placement or Placement(driver, {})
        self._current_stream = current_stream or (lambda: stream)
        self._blueprints = Blueprints()
        self._rejected: GraphMismatch | None = None  # why no graph of the bundle fits here
        self._needs: dict[str, _Needs] = {}  # of each graph that was asked about
        self._filled = False  # whether permanent contents are in place
        self._builder: GraphBuilder | None = None
        try:
            self._blueprints = blueprints if isinstance(blueprints, Blueprints) else decode_blueprints(blueprints)
            check_fingerprint(self._blueprints.fingerprint, fingerprint)
            self._builder = GraphBuilder(driver, self._blueprints)
        except NotCompiledError as error:
            self._rejected = GraphMismatch(Reason.NOT_COMPILED, str(error))
        except DeviceError as error:
            self._rejected = GraphMismatch(Reason.DRIVER_CALL, str(error))
        except (StateError, ValueError) as error:
            self._rejected = GraphMismatch(Reason.CORRUPT, str(error))
        except GraphMismatch as mismatch:
            self._rejected = mismatch
        self._graphs = {graph.key: graph for graph in self._blueprints.graphs}
        self._builds: dict[str, Future[None]] = {}  # of graphs that are built in threads
        self._finder = finder or KernelFinder(driver, self._blueprints)
        self._finder.trigger = partial(self._trigger_alone, trigger) if trigger is not None else None
        self.restored = RestoredGraphs(self._finder)

    @property
    def keys(self) -> list[str]:
        """The keys of the bundle's graphs; none if the bundle does not fit here."""
        return [] if self._rejected else list(self._graphs)

    def begin_loading(self, keys: Sequence[str]) -> None:
        """Begin to load kernel images in threads, in the order in which the graphs with these keys need them.

        Then the first graphs are built while images of others are loaded. If this is not called, or no graph of these
        fits here, the first graph that is built begins it.
        """
        with suppress(DeviceError):  # the first graph says why
            if images := [image for key in keys for image in self._images(key)]:
                self._finder.begin_loading(images)

    def build(self, keys: Sequence[str]) -> None:
        """Load images, relocate, and build these graphs, in several threads.

        This needs the weights' addresses, but not their bytes.
        """
        with self._building(keys):
            pass

    def restore(self, keys: Sequence[str], validate: str = "all") -> GraphMismatch | None:
        """Do the same as ``build`` and then ``verify``, but replay graphs while others are still built."""
        checked = _to_check(keys, validate)
        with self._building((*checked, *keys)):
            wait([self._builds[key] for key in checked if key in self._builds])
            early = bool(checked) and all(key in self.restored.graphs for key in checked)
            wrong = self._difference(checked) if early else None
        if not early:
            return self.verify(keys, validate)
        # What was uploaded behind the replays has to be there, too.
        wrong = wrong or self._mismatch_of(partial(self._driver.call, "cuStreamSynchronize", self._stream))
        return self._reject(keys, wrong)

    def build_one(self, keys: Sequence[str]) -> str:
        """Build one of these graphs, the first whose images are loaded, and return its key. Waits for such a graph.

        One image can be as large as all others together. The graphs that do not use it are built meanwhile.
        """
        self.begin_loading(keys)
        key = self._next(keys)
        if build := self._prepared(key):
            self._build(key, build)
        return key

    @contextmanager
    def _building(self, keys: Sequence[str]) -> Iterator[None]:
        """Build graphs in threads. The block begins when all have their images, and ends when all are built."""
        left = list(dict.fromkeys(keys))
        is_alone = len(left) == 1  # and needs no thread
        self.begin_loading(left)
        with ThreadPoolExecutor(self.builders, "graphs") as threads:
            try:
                while left:
                    left.remove(key := self._next(left))
                    if (build := self._prepared(key)) and is_alone:
                        self._build(key, build)
                    elif build:
                        with self._recording_reason(key):
                            context = self._driver.current_context()
                            self._builds[key] = threads.submit(self._build_in_thread, key, build, context)
                yield
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
            finally:
                builds, self._builds = self._builds, {}
        for done in builds.values():
            done.result()

    def _next(self, keys: Sequence[str]) -> str:
        """Return the first of these keys whose graph has its images. Waits for such a graph."""
        while True:
            loading = self._finder.loading()
            for key in keys:
                if loading.isdisjoint(self._images(key)):
                    return key
            self._finder.wait_for_an_image()

    def _images(self, key: str) -> tuple[str, ...]:
        """Return the digests of the images that a graph uses; none if it does not fit here."""
        if key not in self._graphs or self._rejected is not None:
            return ()
        try:
            return self._needed(self._graphs[key]).images
        except GraphMismatch:  # building it says why
            return ()

    def _needed(self, graph: GraphBlueprint) -> _Needs:
        """Return what a graph needs, which is found out once. Raises GraphMismatch."""
        if graph.key not in self._needs:
            assert self._builder is not None  # else all graphs were rejected
            used = self._builder.used(graph)
            ranges = (self._blueprints.ranges[number] for number in used.ranges)
            images = [self._blueprints.kernels[number].image for number in used.kernels]
            images += [image_of(one.name) for one in ranges if one.kind == RangeKind.MODULE]
            self._needs[graph.key] = _Needs(used, tuple(dict.fromkeys(images)))
        return self._needs[graph.key]

    def _prepared(self, key: str) -> Callable[[], int] | None:
        """Return what builds a graph; None if it has been built, or if it is known why it cannot be."""
        if key in self.restored.graphs or key in self.restored.reasons:
            return None
        if self._rejected is not None:
            self.restored.reasons[key] = self._rejected
            return None
        if key not in self._graphs:
            absent = f"{Reason.ABSENT}: it was not materialized"
            self.restored.reasons[key] = GraphMismatch.parse(self._blueprints.refused.get(key, absent))
            return None
        with self._recording_reason(key):
            return self._prepare(self._graphs[key])
        return None

    def _prepare(self, graph: GraphBlueprint) -> Callable[[], int]:
        """Return what builds a graph, in any thread."""
        _check_pins(self._blueprints, graph, self.placement)
        assert self._builder is not None  # else it was rejected
        used = self._needed(graph).used
        kernels = {number: self._finder.handle(number, graph.key) for number in used.kernels}
        addresses = {number: self._start(self._blueprints.ranges[number]) for number in used.ranges}
        return partial(self._builder.build, graph, kernels=kernels, addresses=addresses, stream=self._stream)

    def _build(self, key: str, build: Callable[[], int]) -> None:
        with self._recording_reason(key):
            self.restored.graphs[key] = RestoredGraph(self._driver, build(), self._current_stream)

    def _build_in_thread(self, key: str, build: Callable[[], int], context: int) -> None:
        with self._recording_reason(key):
            self._driver.use_in_thread(context)
            self._build(key, build)

    @contextmanager
    def _recording_reason(self, key: str) -> Iterator[None]:
        try:
            yield
        except GraphMismatch as mismatch:
            self.restored.reasons[key] = mismatch
        except DeviceError as error:
            self.restored.reasons[key] = GraphMismatch(Reason.DRIVER_CALL, str(error))

    def _trigger_alone(self, trigger: Trigger, key: str) -> int:
        """Capture a first layer while no graph is built."""
        wait(self._builds.values())
        return trigger(key)

    def _start(self, memory_range: MemoryRange) -> int:
        """Return where a range is now. Raises GraphMismatch if it is nowhere."""
        if memory_range.kind != RangeKind.MODULE:
            return self.placement.address(memory_range, 0)
        variable = self._finder.variable(memory_range.name)
        if variable is None:
            name = memory_range.name.partition(":")[2]
            raise GraphMismatch(Reason.MEMORY_RANGE, f"the variable {name} is in no loaded image")
        return variable

    def verify(self, keys: Sequence[str], validate: str = "all") -> GraphMismatch | None:
        """Replay graphs that were built, and compare their outputs. Return the first difference, or None.

        A difference rejects all these keys. The weights' bytes, and everything else on which the reference outputs
        depend, must be there. ``validate`` is as in ``restore_graphs``. Raises DeviceError if a replay breaks the
        context.
        """
        built = [key for key in keys if key in self.restored.graphs]
        if not built:
            return None
        return self._reject(built, self._difference(_to_check(built, validate)))

    def _reject(self, keys: Sequence[str], wrong: GraphMismatch | None) -> GraphMismatch | None:
        """Reject those of these graphs that are built, if there is a difference, and return it."""
        if wrong is not None:
            self.restored.reject([key for key in keys if key in self.restored.graphs], wrong)
        return wrong

    def _difference(self, keys: Sequence[str]) -> GraphMismatch | None:
        """Replay graphs, and return the first difference in outputs.

        This is MEDUSA §4's validation, here done before the first token.
        """
        return self._mismatch_of(partial(self._replay, keys))

    def _replay(self, keys: Sequence[str]) -> None:
        replayer = Replayer(self._driver, self._at, self._stream)
        if not self._filled:  # only once, because later the graphs have written there themselves
            replayer.write(piece for piece in self._blueprints.contents if not self._is_unloaded(piece))
            self._filled = True
        for key in [*keys] * _REPLAYS:
            blueprint, graph = self._graphs[key], self.restored.graphs[key]
            found = replayer.run(partial(graph.launch, self._stream), blueprint.inputs, blueprint.outputs)
            if found != blueprint.outputs:
                raise GraphMismatch(Reason.OUTPUT, f"a replay of {key} did not give its stored outputs")

    def _mismatch_of(self, work: Callable[[], None]) -> GraphMismatch | None:
        """Return why some work failed; None if it did not. Raises DeviceError if it broke the context."""
        try:
            work()
        except GraphMismatch as mismatch:
            return mismatch
        except CudaError as error:
            if error.sticky:
                raise DeviceError(
                    f"a restored CUDA graph broke the context ({error}); start with --state none"
                ) from error
            return GraphMismatch(Reason.DRIVER_CALL, str(error))
        return None

    def _at(self, piece: Piece) -> int:
        memory_range = self._blueprints.ranges[piece.memory_range]
        if memory_range.kind == RangeKind.MODULE:
            return (self._finder.variable(memory_range.name) or 0) + piece.offset
        return self.placement.address(memory_range, piece.offset)

    def _is_unloaded(self, piece: Piece) -> bool:
        """Return whether a piece is in a variable of an image that is not loaded here, so no graph here needs it."""
        memory_range = self._blueprints.ranges[piece.memory_range]
        try:
            return memory_range.kind == RangeKind.MODULE and self._finder.variable(memory_range.name) is None
        except GraphMismatch:  # the image is damaged, or the driver refused it
            return True


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
    """Restore the graphs with these keys, as far as they fit here. A bad bundle raises no error, but is logged once.

    The weights' bytes, and everything else on which the reference outputs depend, must be there already. ``validate``
    says which graphs to replay and compare with their stored outputs: "all", "ends" (the first and the last of
    ``keys``) or "none". One difference rejects all graphs. The other arguments are those of ``GraphRestorer``.

    Raises DeviceError if a replay breaks the context. Then nothing works in this process any more, and the next one
    must start without the bundle.
    """
    restoration = GraphRestorer(
        driver,
        blueprints,
        placement=placement,
        stream=stream,
        fingerprint=fingerprint,
        current_stream=current_stream,
        trigger=trigger,
    )
    restoration.begin_loading(keys)
    restoration.restore(keys, validate)
    log_reasons(restoration.restored)
    return restoration.restored


def log_reasons(restored: RestoredGraphs, keys: Container[str] | None = None) -> None:
    """Log in one line why graphs have to be captured: all of them, or those with ``keys``."""
    found = [mismatch for key, mismatch in restored.reasons.items() if keys is None or key in keys]
    reasons = Counter(str(mismatch) for mismatch in found)
    if reasons:
        first, _ = reasons.most_common(1)[0]
        more = f" (and {len(reasons) - 1} other reasons)" if len(reasons) > 1 else ""
        logger.warning("%d CUDA graphs are captured, not restored: %s%s", len(found), first, more)


def _to_check(keys: Sequence[str], validate: str) -> list[str]:
    """Return the keys of the graphs to replay, of those that are built."""
    if validate == "all":
        return list(keys)
    return list(dict.fromkeys((keys[0], keys[-1]))) if validate == "ends" and keys else []


def _check_pins(blueprints: Blueprints, graph: GraphBlueprint, placement: Placement) -> None:
    for number in graph.pinned:
        memory_range = blueprints.ranges[number]
        address = placement.addresses.get(memory_range.name)
        if address != memory_range.address:
            where = "nowhere" if address is None else f"{address:#x}"
            raise GraphMismatch(
                Reason.ADDRESS, f"expected {memory_range.name} at {memory_range.address:#x}, found it {where}"
            )
