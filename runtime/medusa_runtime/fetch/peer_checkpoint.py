"""Open a checkpoint that a peer offers. The object store only confirms the versions; nothing is read from it."""

from __future__ import annotations

from contextlib import closing
from pathlib import PurePosixPath
from typing import NamedTuple

from ..checkpoint.index import WeightIndex
from ..checkpoint.reader import Checkpoint, CheckpointRecord
from ..errors import CorruptError
from ..storage.framing import is_bundle_file, is_sent_to_peers
from ..storage.peer import PeerIndex
from ..storage.sources import SourcesStore

_MOST_CHUNKS = 1 << 20  # no sensible region has more


class PeerCheckpoint(NamedTuple):
    """A checkpoint, and the size of the chunks in the peers' regions."""

    checkpoint: Checkpoint
    chunk_bytes: int


def open_peer_checkpoint(sources: SourcesStore, record: CheckpointRecord | None) -> PeerCheckpoint | None:
    """Return the checkpoint of the first peer whose version the object store does not contradict; None without one.

    ``record``, the checkpoint's, is read meanwhile.
    """
    begun = False
    with closing(sources.peer_indexes()) as indexes:
        for found in indexes:
            try:
                index = _checked(found)
            except CorruptError as error:
                sources.exclude(found.node_url, f"it sends wrong bytes ({error})")
                continue
            bundle = {name: body for name, body in found.files.items() if is_bundle_file(name)}
            if record is not None and not begun and not bundle:
                record.begin(sources)  # meanwhile
                begun = True
            if sources.is_current({shard.name: shard.version for shard in index.shards}):
                if record is not None and not begun:
                    sources.take_bundle(bundle)
                    record.begin(sources)
                files = {name: body for name, body in found.files.items() if not is_bundle_file(name)}
                return PeerCheckpoint(Checkpoint(sources, index, files), found.chunk_bytes)
            sources.exclude(found.node_url, "it has an older version of the model than the object store")
    return None


def _checked(found: PeerIndex) -> WeightIndex:
    """Return the offered index.

    Raises CorruptError unless its shards are placed as this node would place them, so that a peer can name neither
    files of this machine nor bytes out of bounds.
    """
    index = WeightIndex.from_json(found.index_text)
    placed = WeightIndex.from_headers(
        [shard._replace(offset=0, path=None) for shard in index.shards], [{}] * len(index.shards)
    )
    if placed.shards != index.shards or not all(map(_is_inside, [*found.files, *(each.name for each in index.shards)])):
        raise CorruptError("expected an index of a store's shards, one behind the other")
    if index.total_bytes > _MOST_CHUNKS * found.chunk_bytes or not all(map(is_sent_to_peers, found.files)):
        raise CorruptError("expected chunks that fit the checkpoint's size, and only files of the checkpoint")
    return index


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and name.isprintable()


__all__ = ["PeerCheckpoint", "open_peer_checkpoint"]
