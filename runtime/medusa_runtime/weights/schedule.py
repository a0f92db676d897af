"""Which range is fetched next, and the thread that makes its pages ahead of the receivers."""

from __future__ import annotations

import threading
from typing import NamedTuple

from .pages import populate_write
from .region_writer import RegionWriter

_LARGEST_SPAN_BYTES = 8 << 20
# Pages are made this far in front of the receivers: enough never to be caught up by a burst, too little to take the
# memory and the CPU of a whole checkpoint from the imports that run at the same time.
_AHEAD_BYTES = 128 << 20
_STEP_BYTES = 4 << 20


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
        self._moved = threading.Condition(self._lock)
        self._stopped = False

    @property
    def exhausted(self) -> bool:
        return self._stopped or self._next >= len(self._pending)

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
            self._moved.notify_all()
            return Span(first, count)

    def stop(self) -> None:
        """No more ranges; everybody ends after the one in hand."""
        with self._lock:
            self._stopped = True
            self._moved.notify_all()

    def ahead(self, made: int) -> range | None:
        """Which of the pending chunks (by position) should have pages next, when ``made`` positions have; waits."""
        per_step = max(_STEP_BYTES // self._chunks.chunk_bytes, 1)
        window = max(_AHEAD_BYTES // self._chunks.chunk_bytes, 1)
        with self._lock:
            while not self._stopped and made >= min(self._next + window, len(self._pending)):
                if made >= len(self._pending):
                    return None
                self._moved.wait(0.1)
            if self._stopped:
                return None
            start = max(made, self._next)  # receivers that came this far have made their own pages
            return range(start, min(start + per_step, len(self._pending)))

    def pending(self, position: int) -> int:
        return self._pending[position]


class Populator(threading.Thread):
    """Touches fresh pages before the receivers do: a fault inside recv costs half the bandwidth."""

    def __init__(self, writer: RegionWriter, schedule: Schedule) -> None:
        super().__init__(name="populate", daemon=True)
        self._schedule = schedule
        self._writer = writer
        self._base = writer.address()

    def run(self) -> None:
        chunks = self._writer.chunks
        assert chunks is not None
        made = 0
        while (step := self._schedule.ahead(made)) is not None:
            for position in step:
                chunk = self._schedule.pending(position)
                place = chunks.place(chunk)
                if not populate_write(self._base + self._writer.offset(chunk), place.stop - place.start):
                    return
            made = max(made, step.stop)
