"""Which range is fetched next."""

from __future__ import annotations

import threading
from typing import NamedTuple

from .region_writer import RegionWriter

_LARGEST_SPAN_BYTES = 8 << 20


class Span(NamedTuple):
    """Neighbouring chunks of one shard: what one request asks for."""

    first: int
    length: int


class Schedule:
    """Hands out the chunks that are missing, in execution order. Thread-safe."""

    def __init__(self, writer: RegionWriter) -> None:
        assert writer.chunks is not None
        self._chunks = writer.chunks
        self._pending = writer.pending()
        self._next = 0
        self._lock = threading.Lock()
        self._stopped = False

    @property
    def exhausted(self) -> bool:
        return self._stopped or self._next >= len(self._pending)

    @property
    def left_bytes(self) -> int:
        """Not yet handed out; a short last chunk counts in full."""
        return (len(self._pending) - self._next) * self._chunks.chunk_bytes

    def take(self, takers: int) -> Span | None:
        """The next range: up to 8 MiB, and less when few bytes are left for ``takers`` connections."""
        with self._lock:
            if self._stopped or self._next >= len(self._pending):
                return None
            first = self._pending[self._next]
            most = max(_LARGEST_SPAN_BYTES // self._chunks.chunk_bytes, 1)
            most = max(min(most, (len(self._pending) - self._next) // (2 * takers)), 1)
            shard, count = self._chunks.place(first).shard, 1
            while (
                count < most
                and self._next + count < len(self._pending)
                and self._pending[self._next + count] == first + count
                and self._chunks.place(first + count).shard == shard
            ):
                count += 1
            self._next += count
            return Span(first, count)

    def stop(self) -> None:
        """No more ranges; everybody ends after the one in hand."""
        with self._lock:
            self._stopped = True
