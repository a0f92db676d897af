"""A checkpoint as a peer offers it: nothing of it is read from the object store, which only confirms the versions."""

from __future__ import annotations

from contextlib import closing
from pathlib import PurePosixPath
from typing import NamedTuple

from ..checkpoint.index import WeightIndex
from ..checkpoint.reader import Checkpoint, Known
from ..errors import CorruptError
from ..storage.framing import is_bundled, is_shared
from ..storage.peer import Offer
from ..storage.sources import SourcesStore

_MOST_CHUNKS = 1 << 20  # the table of a larger region is no sensible one


class Offered(NamedTuple):
    """A checkpoint, and how the peers' regions are cut into chunks."""

    checkpoint: Checkpoint
    chunk_bytes: int


def open_offered(sources: SourcesStore, known: Known | None) -> Offered | None:
    """Return the checkpoint of the first peer whose version the object store does not deny; None if there is none.

    ``known`` begins to read meanwhile what it knows of the checkpoint.
    """
    begun = False
    with closing(sources.offers()) as offers:
        for offer in offers:
            try:
                index = _checked(offer)
            except CorruptError as error:
                sources.exclude(offer.node_url, f"it sends wrong bytes ({error})")
                continue
            bundle = {name: body for name, body in offer.files.items() if is_bundled(name)}
            if known is not None and not begun and not bundle:
                known.begin(sources)  # meanwhile
                begun = True
            if sources.is_current({shard.name: shard.version for shard in index.shards}):
                if known is not None and not begun:
                    sources.take_bundle(bundle)
                    known.begin(sources)
                files = {name: body for name, body in offer.files.items() if not is_bundled(name)}
                return Offered(Checkpoint(sources, index, files), offer.chunk_bytes)
            sources.exclude(offer.node_url, "it has an older version of the model than the object store")
    return None


def _checked(offer: Offer) -> WeightIndex:
    """Return the index. CorruptError unless it is laid out as we would: a peer must not name files of this machine."""
    index = WeightIndex.from_json(offer.index_text)
    placed = WeightIndex.from_headers(
        [shard._replace(offset=0, path=None) for shard in index.shards], [{}] * len(index.shards)
    )
    if placed.shards != index.shards or not all(map(_is_inside, [*offer.files, *(each.name for each in index.shards)])):
        raise CorruptError("expected an index of a store's shards, one behind the other")
    if index.total_bytes > _MOST_CHUNKS * offer.chunk_bytes or not all(map(is_shared, offer.files)):
        raise CorruptError("expected chunks that fit the checkpoint's size, and only files of the checkpoint")
    return index


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and name.isprintable()


__all__ = ["Offered", "open_offered"]
