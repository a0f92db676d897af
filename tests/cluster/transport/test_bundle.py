"""A state bundle in a chain: nodes take it from peers, and the origin sends it once."""

from __future__ import annotations

import shutil
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from medusa_runtime.checkpoint.reader import open_checkpoint
from medusa_runtime.config import Settings
from medusa_runtime.region.chunks import Chunks, chunk_bytes_for
from medusa_runtime.state.bundle.manifest import Manifest
from medusa_runtime.state.bundle.writer import BundleWriter
from medusa_runtime.state.key import Facts, Subject
from medusa_runtime.state.kinds import WEIGHT_INDEX
from medusa_runtime.state.weight_index import RecordedIndex
from peer_nodes import Model, Node


@pytest.mark.parametrize("most_inline_bytes", [0, 96 << 10])
def test_a_bundle_comes_from_peers(
    nodes: Callable[..., list[Node]], model: Model, most_inline_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_runtime.state.bundle.writer._MOST_INLINE_BYTES", most_inline_bytes)
    folder = model.file.parent / ".medusa"
    order = publish(model, folder)
    first, second, third = nodes(3)
    model.check(first.fetch(model.url))
    shutil.rmtree(folder)
    second.read_from(first)
    model.check(second.fetch(model.url))
    third.read_from(second)
    region = third.fetch(model.url)
    model.check(region)
    assert list(region.wait_index(1.0).order) == order
    assert not [name for name in region.file_names() if name.startswith(".medusa/weight")]


def publish(model: Model, folder: Path) -> list[str]:
    """Write a bundle that records checksums and an order, which is not the one that names show; returns the order."""
    checkpoint = open_checkpoint(model.url)
    checkpoint.store.close()
    index = checkpoint.index.reordered(sorted(checkpoint.index.order, reverse=True))
    chunks = Chunks(index, chunk_bytes_for(index))
    places = [chunks.shard_range(chunk) for chunk in range(chunks.count)]
    sums = array("Q", [zlib.crc32(model.data[place.start : place.stop]) for place in places])
    blob = RecordedIndex(index, chunks.chunk_bytes, {"crc32": sums}).to_bytes()
    key = Facts(Subject(index, {}, Settings(engine="torch"))).key(WEIGHT_INDEX.facts)
    with BundleWriter(folder) as writer:
        writer.commit(Manifest((writer.add(WEIGHT_INDEX.name, key, blob),), ("config.json", "tokenizer.json")))
    return list(index.order)
