"""The layout of a region: header, chunk table, checksums, index, small files with their directory, and data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from ..checkpoint.index import PAGE_BYTES, WeightIndex
from .chunks import Chunks, chunk_bytes_for
from .layout import TABLE_OFFSET

_CHECKSUM_BYTES = 8
DATA_ALIGN_BYTES = 2 << 20  # a huge page, where the kernel has them for shared memory


class RegionPlan(NamedTuple):
    """The layout of a region, in bytes from its start.

    ``places`` has each file's offset and length and, for a late file, the offset of its state.
    """

    chunks: Chunks
    index_text: bytes
    index_offset: int
    places: dict[str, tuple[int, ...]]
    directory: bytes  # the places as JSON
    directory_offset: int
    data_offset: int
    size_bytes: int  # of the memfd
    checksums_offset: int  # 0 without checksums
    memory_bytes: int  # how much memory it will take; less than the size, which includes the gap in front of the data

    @classmethod
    def of(
        cls,
        index: WeightIndex,
        files: Mapping[str, bytes],
        late_sizes: Mapping[str, int],
        peer_chunk_bytes: int | None = None,
    ) -> RegionPlan:
        """Plan the region of a checkpoint.

        ``late_sizes`` has the sizes of late files, in bytes. ``peer_chunk_bytes`` is the chunks' size in a region that
        other machines read, which has room for checksums.
        """
        chunks = Chunks(index, peer_chunk_bytes or chunk_bytes_for(index))
        text = index.to_json()
        checksums_offset = _align(TABLE_OFFSET + chunks.count, _CHECKSUM_BYTES) if peer_chunk_bytes else 0
        end = checksums_offset + _CHECKSUM_BYTES * chunks.count if checksums_offset else TABLE_OFFSET + chunks.count
        index_offset = _align(end, PAGE_BYTES)
        at = index_offset + len(text)
        places: dict[str, tuple[int, ...]] = {}
        for name, body in files.items():
            places[name] = (at, len(body))
            at += len(body)
        for name, length in late_sizes.items():
            places[name] = (at + 1, length, at)  # the byte in front of it is its state
            at += 1 + length
        directory = json.dumps(places).encode()
        data_offset = at + len(directory)
        size = _align(data_offset, PAGE_BYTES)
        memory_bytes = size + _align(index.region_bytes, PAGE_BYTES)
        if index.region_bytes:
            data_offset = _align(data_offset, DATA_ALIGN_BYTES)
            size = _align(data_offset + index.region_bytes, PAGE_BYTES)
        return cls(chunks, text, index_offset, places, directory, at, data_offset, size, checksums_offset, memory_bytes)


def _align(value: int, step: int) -> int:
    return -(-value // step) * step
