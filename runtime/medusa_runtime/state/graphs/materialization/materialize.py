"""Make blueprints of captured graphs, offline (MEDUSA §4, §5)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..blueprint import Blueprints, Piece, RangeKind
from ..driver import CudaDriver
from ..mismatch import GraphMismatch, Reason
from ..replay import Launch, Replayer
from ..tensor_map import MAP_BYTES, replacer
from .dump import REGISTERS
from .images import ImageStore
from .memory_ranges import RangeMap
from .poison import permanent_contents
from .relocate import find_relocations

logger = logging.getLogger(__name__)

_NOWHERE = 0xDEAD << 48  # beyond all addresses of a GPU and of a process
_PAGE = 4096  # the offset in it stays, on which alignment may depend


@dataclass(frozen=True)
class Capture:
    """What the engine that has captured graphs provides, besides the dump of them.

    launches: by key, a function that replays the graph. A replay may include graphs that have no launch of their own.
    inputs: by key, what to write before a reference replay.
    outputs: by key, what to compare after it. Only the length of their data counts.
    stream: the stream of the launches.
    images: the cubins that were loaded while capturing.
    fingerprint: what the graphs are valid for.
    reads_host: whether kernels may be given addresses of pinned memory of the host as parameters. If not, such a
        parameter is stale, as a word inside a structure may be in any case.
    finds_contents: whether to look, by overwriting memory, for contents that graphs need and do not write. If not, all
        of it counts as scratch memory.
    """

    launches: Mapping[str, Launch]
    inputs: Mapping[str, tuple[Piece, ...]]
    outputs: Mapping[str, tuple[Piece, ...]]
    stream: int
    images: ImageStore
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    reads_host: bool = True
    finds_contents: bool = True


def materialize_graphs(
    driver: CudaDriver, dump: Blueprints, capture: Capture, *, second: Blueprints | None = None
) -> Blueprints:
    """Make blueprints of the graphs in ``dump``, which are still alive in this process.

    ``second`` is a dump of the same graphs, captured with every range at another address, by this process or another
    one. It proves which words are pointers. Without it, graphs can only be restored at their captured addresses. A
    graph that cannot be materialized is in ``refused`` with the reason, which is also logged.
    """
    result = find_relocations(_with_images(dump, capture.images), second, replacer(driver))
    logger.info("words of %d graphs: %s", len(result.blueprints.graphs), dict(result.words))
    for kernel, count in result.opaque.items():
        logger.warning(
            "%d graphs only fit where they were captured: %s has a word that two captures do not explain", count, kernel
        )
    blueprints = _without_foreign_pointers(driver, result.blueprints, capture.reads_host)
    captured = [memory_range.address for memory_range in blueprints.ranges]
    replayer = Replayer(driver, lambda piece: captured[piece.memory_range] + piece.offset, capture.stream)
    blueprints = _with_references(blueprints, capture, replayer)
    contents: tuple[Piece, ...] = ()
    logger.info("%d graphs give the same outputs twice", len(blueprints.graphs))
    try:
        if capture.finds_contents:
            contents = permanent_contents(blueprints, capture.launches, replayer)
    except GraphMismatch as mismatch:
        blueprints = blueprints.without({graph.key: str(mismatch) for graph in blueprints.graphs})
    logger.info("%d bytes of scratch memory must be restored", sum(len(piece.data) for piece in contents))
    images = _images(blueprints, capture.images)
    contents = (*dump.contents, *contents)
    blueprints = replace(blueprints, host=(), contents=contents, fingerprint=dict(capture.fingerprint), images=images)
    for reason, count in Counter(blueprints.refused.values()).items():
        logger.warning("%d CUDA graphs are not materialized: %s", count, reason)
    return blueprints


def _with_images(blueprints: Blueprints, images: ImageStore) -> Blueprints:
    """Add kernels' images to a dump that was made without them. Images that the dump has remain."""
    kernels = []
    for kernel in blueprints.kernels:
        image = kernel.image or images.of(kernel.name, kernel.parameters, dict(kernel.attributes).get(REGISTERS, 0))
        kernels.append(kernel._replace(image=image))
    return replace(blueprints, kernels=tuple(kernels))


def _without_foreign_pointers(driver: CudaDriver, blueprints: Blueprints, reads_host: bool) -> Blueprints:
    """Refuse each graph with a device address in no known range, such as a library's own.

    Addresses of pinned memory of the host are replaced by ones that nothing can be at, unless they are parameters of
    their own and ``reads_host``. Most are stale: copies before a launch have left them on the stack. If a kernel reads
    there nevertheless, it breaks the context, which leaves its graph out when that is checked. It never reads what
    another process has at that address.
    """
    known: dict[int, bool | None] = {}  # by word: whether it is the host's address; None for no foreign address
    free, used = RangeMap(blueprints.ranges, free=True), RangeMap(blueprints.ranges)
    graphs, refused, replaced = [], {}, 0
    for graph in blueprints.graphs:
        blob = bytearray(graph.blob)
        relocated = {relocation.position for relocation in graph.relocations}
        for relocation in graph.relocations:
            if relocation.map:
                relocated.update(range(relocation.position, relocation.position + MAP_BYTES, 8))
        for number, node in enumerate(graph.nodes):
            for start, stop in blueprints.words(node):
                for position in range(start + -(start - node.start) % 8, stop - 7, 8):
                    word = int.from_bytes(graph.blob[position : position + 8], "little")
                    if position in relocated or word < 1 << 32:
                        continue
                    if any(place.memory_range in graph.pinned for place in used.places(word)):
                        continue  # a pinned range will be at this address
                    if word not in known:
                        is_foreign = not free.places(word) and driver.range_of(word) is not None
                        known[word] = driver.on_host(word) if is_foreign else None
                    if known[word] and (stop - start > 8 or not reads_host):
                        blob[position : position + 8] = (_NOWHERE | word % _PAGE).to_bytes(8, "little")
                        replaced += 1
                    elif known[word] is not None:
                        detail = f"node {number} points to {word:#x}, which is memory without a name"
                        refused[graph.key] = f"{Reason.FOREIGN_POINTER}: {detail}"
        graphs.append(replace(graph, blob=bytes(blob)))
    if replaced:
        logger.info("%d words with addresses of pinned memory of the host are replaced", replaced)
    return replace(blueprints, graphs=tuple(graphs)).without(refused)


def _with_references(blueprints: Blueprints, capture: Capture, replayer: Replayer) -> Blueprints:
    """Add the inputs and outputs of a replay to each graph. Refuse a graph if two replays differ."""
    graphs, refused = [], {}
    for graph in blueprints.graphs:
        if graph.key not in capture.launches:
            graphs.append(graph)
            continue
        inputs, outputs, launch = capture.inputs[graph.key], capture.outputs[graph.key], capture.launches[graph.key]
        first = replayer.run(launch, inputs, outputs)
        if replayer.run(launch, inputs, outputs) == first:
            graphs.append(replace(graph, inputs=inputs, outputs=first))
        else:
            refused[graph.key] = f"{Reason.NOT_DETERMINISTIC}: two replays gave different outputs"
    return replace(blueprints, graphs=tuple(graphs), refused={**blueprints.refused, **refused})


def _images(blueprints: Blueprints, store: ImageStore) -> dict[str, bytes]:
    """Return the images that the graphs use, by digest."""
    used = {
        blueprints.kernels[node.kernel].image
        for graph in blueprints.graphs
        for node in graph.nodes
        if node.kernel >= 0 and blueprints.kernels[node.kernel].image
    }
    pointed = {relocation.memory_range for graph in blueprints.graphs for relocation in graph.relocations}
    for number in pointed:
        if blueprints.ranges[number].kind == RangeKind.MODULE:
            used.add(blueprints.ranges[number].name.partition(":")[0])
    return {digest: store.data[digest] for digest in sorted(used)}
