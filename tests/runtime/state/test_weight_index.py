"""The recorded index: order, checksums by several algorithms, and no path of the machine that made it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fetching import fetch_into
from medusa_runtime.checkpoint import checksums
from medusa_runtime.errors import StateError
from medusa_runtime.region.reader import Region
from medusa_runtime.state.weight_index import RecordedIndex, record_index

EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"


@pytest.fixture
def region() -> Iterator[Region]:
    region = Region.create()
    fetch_into(region, str(EXAMPLE))
    yield region
    region.close()


def test_it_survives_its_bytes_and_holds_no_path(region: Region) -> None:
    index = region.wait_index()
    recorded = record_index(region, list(reversed(index.order)))
    again = RecordedIndex.from_bytes(recorded.to_bytes())
    assert again.index.order == tuple(reversed(index.order))
    assert again.index.recorded
    assert (again.checksums, again.chunk_bytes) == (recorded.checksums, recorded.chunk_bytes)
    assert again.index.shards[0].path is None
    assert str(EXAMPLE).encode() not in zlib.decompress(recorded.to_bytes())


@pytest.mark.parametrize(("place", "value"), [(4, "/etc/passwd"), (2, 10**12), (3, 1)])
def test_a_shard_that_names_a_file_or_other_bytes_is_refused(region: Region, place: int, value: object) -> None:
    document = json.loads(zlib.decompress(record_index(region, None).to_bytes()))
    document["index"]["shards"][0][place] = value
    with pytest.raises(StateError, match="expected a weight index, found something else"):
        RecordedIndex.from_bytes(zlib.compress(json.dumps(document).encode()))


def test_chunks_are_verified_by_the_fastest_algorithm_there_is(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    index = region.wait_index()
    recorded = RecordedIndex.from_bytes(record_index(region, None).to_bytes())
    data = region.shard(0)[: recorded.chunk_bytes]
    found = recorded.checksums_for(index)
    assert found
    assert found.algorithm == "xxh3_64"
    assert found.matches(0, data)
    wrong = bytearray(data)
    wrong[-1] ^= 1
    assert not found.matches(0, memoryview(wrong))
    monkeypatch.setitem(checksums._IMPLEMENTATIONS, "xxh3_64", (("no_such_package", "digest"),))
    found = recorded.checksums_for(index)
    assert found
    assert found.algorithm == "crc32"
    assert found.matches(0, data)
    assert not found.matches(0, memoryview(wrong))


def test_checksums_are_held_against_the_store_only_for_its_very_version(region: Region) -> None:
    recorded, index = record_index(region, None), region.wait_index()
    found = recorded.checksums_for(index)
    assert found
    assert found.pinned
    moved = type(index)([shard._replace(version="of another store") for shard in index.shards], index.tensors)
    found = recorded.checksums_for(moved)
    assert found
    assert not found.pinned


def test_an_algorithm_of_the_future_is_passed_over(region: Region) -> None:
    document = json.loads(zlib.decompress(record_index(region, None).to_bytes()))
    document["checksums"] = {"blake9": document["checksums"]["crc32"]}
    assert (
        RecordedIndex.from_bytes(zlib.compress(json.dumps(document).encode())).checksums_for(region.wait_index())
        is None
    )


@pytest.mark.parametrize("data", [b"", b"plain", zlib.compress(b"{}"), zlib.compress(b'{"index": {"format": 99}}')])
def test_what_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(StateError, match="expected a weight index"):
        RecordedIndex.from_bytes(data)
