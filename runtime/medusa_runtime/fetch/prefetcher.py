"""The prefetcher: fills a region with a checkpoint, in the order in which a forward pass needs it.

It never imports torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ..checkpoint.index import WeightIndex
from ..checkpoint.order import layers_first
from ..checkpoint.reader import Checkpoint, CheckpointRecord, open_checkpoint
from ..checkpoint.text_part import only_text
from ..errors import TooLargeError
from ..process_limits import check_files
from ..region.chunks import chunk_bytes_for
from ..region.layout import State
from ..region.plan import RegionPlan
from ..storage.framing import PEER_CHUNK_BYTES
from ..storage.retry import RETRIES
from .load_priority import LoadPriority
from .schedule import UNRELEASED_BYTES, Schedule
from .streams import Streams, as_medusa_error

if TYPE_CHECKING:
    from ..checkpoint.checksums import Checksums
    from ..config import Settings
    from ..region.reader import Region
    from ..region.writer import RegionWriter
    from ..storage.base import Store
    from ..storage.sources import SourcesStore
    from ..timeline import Timeline

logger = logging.getLogger(__name__)

# The memory that the prefetcher itself needs beside the region: for connections, headers and the interpreter.
_SPARE_BYTES = 64 << 20
# Small chunks keep a chain short, since each node is one chunk later than the one before it. But each chunk costs both
# nodes some CPU time, so there are not more than this many.
_MOST_PEER_CHUNKS = 1024
# The niceness of a fetch beside imports, which go first: they need one core, and the first token waits for them, too.
BESIDE_IMPORTS = 10
# Returns whether the engine copies the weights of a checkpoint, of which it gets the small files, to a GPU.
Uploads = Callable[[Mapping[str, bytes]], bool]


class RegionOwner(Protocol):
    """The owner of regions that several functions share: the node agent."""

    def admit(self, region_bytes: int) -> None:
        """Grant this much memory before it is allocated. Raises TooLargeError if there is no room for it."""

    def on_laid_out(self, writer: RegionWriter) -> None:
        """Called when the region is laid out. From now on, it can be read."""


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """What a state bundle knows about a checkpoint.

    This is the index in its recorded order, the chunks' checksums, files for the engine, and the sizes of late files in
    bytes.
    """

    index: WeightIndex
    checksums: Checksums | None
    files: Mapping[str, bytes]
    late_sizes: Mapping[str, int]


class OpenBundle(CheckpointRecord, Protocol):
    """A state bundle in use: ``state.restore.BundleRestorer``."""

    def restore(self, checkpoint: Checkpoint) -> RestoredCheckpoint:
        """Return the parts of the bundle that are valid here. Never raises because of a bad bundle."""

    def start(self, writer: RegionWriter) -> None:
        """Start to fetch the late files into a laid-out region. Does not wait."""

    def finish(self) -> None:
        """Wait until each late file is there, or will certainly not come."""

    def close(self) -> None: ...


def prefetch(
    region: Region,
    url: str,
    *,
    settings: Settings,
    timeline: Timeline,
    checksums: Checksums | None = None,
    writer: RegionWriter | None = None,
    nice: int = 0,
    owner: RegionOwner | None = None,
    bundle: OpenBundle | None = None,
    store: Store | None = None,
    sources: SourcesStore | None = None,
    uploads: Uploads | None = None,
    text_only: bool = False,
) -> None:
    """Fetch the checkpoint at ``url`` into ``region`` and seal it. Returns when everything is there.

    If a killed prefetcher has begun to fill the region, this continues its work. Any error is stored in the region for
    its readers, and raised.

    ``writer`` is the region's, if the caller already has it, to reserve memory ahead of time.
    ``nice`` is added to the threads' niceness: BESIDE_IMPORTS if the first token also waits for imports here.
    ``owner`` grants the memory, and is called when the region can be read.
    ``bundle`` brings what a state bundle knows about the checkpoint.
    ``store`` is the checkpoint's, if the caller has opened it; it is closed here. ``sources`` is the store where peers
    may have the checkpoint; the region is then laid out for peers, too.
    ``uploads`` is given if an engine loads from the region meanwhile.
    With ``text_only``, what a model needs for pictures or sound alone is not fetched.
    """
    writer = writer or region.writer()
    try:
        if writer.state == State.DONE:
            writer.seal()
            return
        RETRIES.on_retry = writer.count_retry
        with timeline.stage("index") as detail:
            checkpoint, chunk_bytes = _open(url, bundle, store, sources)
            detail |= {"tensors": len(checkpoint.index.tensors), "shards": len(checkpoint.index.shards)}
        try:
            restored = RestoredCheckpoint(checkpoint.index, checksums, {}, {})
            if bundle is not None:
                restored = bundle.restore(checkpoint)
            if text_only:
                restored = replace(restored, index=only_text(restored.index, checkpoint.files.get("config.json")))
            with LoadPriority(settings.load_priority) as load:
                options = FetchOptions(settings, timeline, nice, owner, bundle, load, sources, chunk_bytes, uploads)
                _fill(writer, checkpoint, restored, options)
        finally:
            if bundle is not None:
                bundle.close()
            checkpoint.store.close()
    except BaseException as error:
        writer.fail(as_medusa_error(error))
        raise
    finally:
        RETRIES.on_retry = None
        writer.close()


def _open(
    url: str, bundle: OpenBundle | None, store: Store | None, sources: SourcesStore | None
) -> tuple[Checkpoint, int | None]:
    """Open a checkpoint. Return it, and the chunk size of the peers' regions if it is read from those."""
    if sources is not None:
        from .peer_checkpoint import open_peer_checkpoint

        found = open_peer_checkpoint(sources, bundle)
        if found is not None:
            return found.checkpoint, found.chunk_bytes
    return open_checkpoint(url, bundle, sources or store), None


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """The options of one fetch, most of which are arguments of ``prefetch``."""

    settings: Settings
    timeline: Timeline
    nice: int
    owner: RegionOwner | None
    bundle: OpenBundle | None
    load: LoadPriority
    sources: SourcesStore | None
    peers_chunk_bytes: int | None  # the chunk size of the peers' regions
    uploads: Uploads | None

    def is_on_gpu(self, files: Mapping[str, bytes]) -> bool:
        """Return whether an engine copies the weights of a checkpoint with these small files to a GPU meanwhile."""
        return self.uploads is not None and self.uploads(files)

    def peer_chunk_bytes(self, restored: RestoredCheckpoint) -> int | None:
        """Return the chunk size of a region for peers: that of their regions, or of the recorded checksums.

        None means that no peers read this region.
        """
        if self.sources is None or not restored.index.region_bytes:
            return None
        if self.peers_chunk_bytes is not None:
            return self.peers_chunk_bytes
        recorded = restored.checksums
        if recorded is not None and recorded.chunk_bytes in PEER_CHUNK_BYTES:
            return recorded.chunk_bytes
        return chunk_bytes_for(restored.index, PEER_CHUNK_BYTES[0], _MOST_PEER_CHUNKS)


def _admitted(
    writer: RegionWriter,
    restored: RestoredCheckpoint,
    files: Mapping[str, bytes],
    options: FetchOptions,
    *,
    released: bool,
) -> Mapping[str, int]:
    """Return the sizes of the late files if there is room for them beside the weights, or else nothing.

    ``released`` means that the engine frees the weights as it copies them. Raises TooLargeError if there is no room for
    the weights.
    """
    index = restored.index
    for late_sizes in (restored.late_sizes, {}):
        region_bytes = index.region_bytes + sum(late_sizes.values())
        try:
            if options.owner is not None:
                plan = RegionPlan.of(index, files, late_sizes, options.peer_chunk_bytes(restored))
                options.owner.admit(plan.memory_bytes)
            if writer.state == State.EMPTY:
                left_out_bytes = index.total_bytes - index.tensor_bytes
                more_bytes = max(region_bytes - writer.reserved_bytes - left_out_bytes, 0)
                if released:
                    more_bytes = min(more_bytes, 2 * UNRELEASED_BYTES + index.largest_tensor_bytes)
                on_gpu = partial(options.is_on_gpu, files)
                check_memory(index.tensor_bytes, more_bytes, options.settings.memory_limit_mb, on_gpu)
            break
        except TooLargeError as error:
            if not late_sizes:
                raise
            logger.warning("there is no room for large artifacts of the state bundle: %s", error)
    return late_sizes


def _fill(writer: RegionWriter, checkpoint: Checkpoint, restored: RestoredCheckpoint, options: FetchOptions) -> None:
    index, checksums = restored.index, restored.checksums
    settings, bundle = options.settings, options.bundle
    own: Sequence[str] = ()
    if settings.layers is not None:
        start, _, stop = settings.layers.partition(":")
        own, rest = layers_first(index.order, int(start), int(stop))
        index = WeightIndex(index.shards, index.tensors, [*own, *rest], recorded=index.recorded)
    files = {**checkpoint.files, **restored.files}
    released = settings.host_weights == "release" and options.is_on_gpu(files)
    late_sizes = _admitted(writer, restored, files, options, released=released)
    with options.timeline.stage("fetch", bytes=index.tensor_bytes) as detail:
        index = writer.lay_out(index, files, late_sizes, options.peer_chunk_bytes(restored))
        if options.owner is not None:
            options.owner.on_laid_out(writer)
        if bundle is not None:
            bundle.start(writer)
        if checksums and not checksums.fits(writer.chunks.chunk_bytes, writer.chunks.count):
            checksums = None
        if options.sources is not None:
            # With recorded checksums, compiled code must not publish chunks, since it does not check these.
            options.sources.set_layout(writer.chunks.chunk_bytes, None if checksums else writer.receive_target)
        if index.region_bytes:
            urgent = {chunk for name in own for chunk in writer.chunks.of_tensor(name)}
            schedule = Schedule(writer, options.load, urgent, _most_ahead(index, writer) if released else math.inf)
            streams = Streams(
                checkpoint.store,
                index,
                writer,
                schedule,
                fixed_connections=settings.connections,
                checksums=checksums,
                nice=options.nice,
                peers=options.sources,
            )
            streams.run()
            detail |= {"connections": streams.connections, "hedges": streams.hedges}
        else:
            from ..storage.local import LocalStore
            from .local_files import warm_page_cache

            assert isinstance(checkpoint.store, LocalStore)
            warm_page_cache(writer, index, checksums, checkpoint.store)
        if bundle is not None:
            bundle.finish()
        # A function that builds its module itself is the only reader, and may free memory. So may an engine on a GPU.
        frees = settings.engine == "none" or settings.host_weights == "release"
        writer.finish(seal=options.owner is not None or not frees)


def _most_ahead(index: WeightIndex, writer: RegionWriter) -> float:
    """Return how many bytes may come before the engine frees any: it frees none before it has been imported."""
    from ..container_limits import memory_available_bytes

    here, available = writer.fetched_bytes, memory_available_bytes() - _SPARE_BYTES
    if index.region_bytes - here <= available:
        return math.inf
    return here + max(available // 2, UNRELEASED_BYTES + index.largest_tensor_bytes)


def check_memory(total_bytes: int, region_bytes: int, limit_mb: int | None, on_gpu: Callable[[], bool]) -> None:
    """Raise TooLargeError if the weights exceed the user's limit, or the region would not fit into free memory.

    Local files are mapped, and the kernel may drop their pages again, so they only count towards the limit.
    ``on_gpu`` returns whether a GPU gets the weights: then the error says how the host can do without them.
    """
    if limit_mb is not None and total_bytes > limit_mb * 10**6:
        raise TooLargeError(
            f"the weights take {_mb(total_bytes)}, but the memory limit is {limit_mb} MB; "
            "expected a smaller checkpoint or a larger --memory-limit-mb"
        )
    from ..container_limits import memory_available_bytes

    needed = region_bytes + _SPARE_BYTES
    if region_bytes and needed > (available := memory_available_bytes()):
        check_files()  # without a further one, nothing is known of the memory
        raise TooLargeError(
            f"the weights need {_mb(needed)} of memory, but only {_mb(available)} are available; "
            "expected a smaller checkpoint or a larger container"
            + (", or --host-weights release, which frees what the GPU has" if on_gpu() else "")
        )


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"
