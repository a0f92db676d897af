"""The schedule of a fetch: which range comes next."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection

from ..region.writer import RegionWriter
from .in_flight import InFlightRange, InFlightRanges, Span
from .load_priority import LoadPriority, is_interactive_load_running

_LARGEST_SPAN_BYTES = 8 << 20
_LARGEST_WHOLE_BYTES = 64 << 20  # of the first range, which may be given back; a peer's answer is not longer
# If a reader frees memory as it copies, what has come is at most this and the largest tensor ahead of it, and what is
# under way at most as much again. prefetcher.py asks for the memory for both.
UNRELEASED_BYTES = 256 << 20
_YIELD_S = 0.005
_PACED_YIELD_S = 0.02  # longer, because many connections wait, and only one of them may go on
_LATE_S = 0.1  # how much delay a paced fetch may make up for


class Schedule:
    """Hands out the chunks that are missing. Thread-safe.

    What a forward waits for comes first, then what readers have hinted at (in a module's construction order, if no
    execution order was recorded), then the rest in the index's order.

    While interactive loads are under way on this machine, a background load fetches one range at a time. It becomes
    interactive as soon as a reader waits for all of it. Readers may set a pace, a share of the link, for chunks that no
    reader waits for. These then come one by one over a single connection, so that other traffic waits for one chunk at
    most.
    """

    def __init__(
        self,
        writer: RegionWriter,
        load: LoadPriority | None = None,
        urgent: Collection[int] = (),
        most_ahead: float = math.inf,
    ) -> None:
        """``urgent`` are chunks that come first. After them, the load goes on in the background.

        ``most_ahead`` is how many bytes may come before the reader frees any.
        """
        self._writer = writer
        self._most_ahead = most_ahead
        self._chunks = writer.chunks
        self._pending = writer.pending()
        self._load = load
        self._urgent = frozenset(urgent)
        self.large = Span(0, 0)  # the large range that was handed out, which may be given back
        self._most_bytes = _LARGEST_SPAN_BYTES if urgent else _LARGEST_WHOLE_BYTES  # the size of the next whole range
        self._taken = bytearray(b"\1" * self._chunks.count)  # 1 also for chunks that are there, or hold no tensor
        for chunk in self._pending:
            self._taken[chunk] = 0
        self._next = self._furthest = 0
        self._handed_out_bytes = writer.fetched_bytes  # with what was there already
        self._lock = threading.Lock()
        self._stopped = False
        self._link_bytes_per_s: float | None = None  # as it was before the fetch was paced
        self._paced_until = 0.0
        self.flights = InFlightRanges()

    @property
    def exhausted(self) -> bool:
        return self._stopped or self._next >= len(self._pending)

    @property
    def complete(self) -> bool:
        """Whether every chunk is there."""
        return self._writer.complete

    @property
    def left_bytes(self) -> int:
        """The number of bytes that have not been handed out yet. A short last chunk counts in full."""
        return (len(self._pending) - self._next) * self._chunks.chunk_bytes

    def take(self, connections: int, *, whole: bool = False) -> Span | None:
        """Return the next range; None when there is none left.

        It has up to 8 MiB, and less if few bytes are left for the ``connections``, or if they come slowly.

        ``whole`` is for ranges that come one after the other, each of which costs both ends CPU time. The first of them
        has up to 64 MiB, and is given back if something else should come first. The others have 8 MiB.

        Waits while a more important load has the right of way, or memory must be freed first.
        """
        while True:
            pause_s = _YIELD_S
            with self._lock:
                if self.exhausted:
                    return None
                awaited = self.awaited()
                first = (*awaited, *self._writer.hinted())
                asked = next((chunk for chunk in first if not self._taken[chunk]), None)
                if not self._leaves_room(asked, awaited) and not self._must_wait(asked, awaited):
                    share = self._share(asked, awaited)
                    if share == 1.0:
                        return self._take(asked, 0 if whole else connections)
                    if share and not self.flights.count and time.monotonic() >= self._paced_until:
                        return self._take_paced(asked, share)
                    pause_s = _PACED_YIELD_S
            time.sleep(pause_s)

    def should_give_back(self, *, alone: bool) -> bool:
        """Return whether the rest of the large range should be given back.

        This is so if it is no longer ``alone`` on the link, if something else should come first, or if readers have set
        a pace.
        """
        span, present = self.large, self._writer.present
        missing = [chunk for chunk in span.chunks if not present(chunk)]
        soon = _LARGEST_SPAN_BYTES // self._chunks.chunk_bytes
        if len(missing) <= soon:
            return False
        with self._lock:
            awaited = self.awaited()
            first = next((chunk for chunk in (*awaited, *self._writer.hinted()) if not present(chunk)), missing[0])
            comes_soon = first in missing[:soon] or (self._taken[first] and first not in span.chunks)
            paced = self._writer.demand.share != 1.0 or (not awaited and self._is_less_important())
            return paced or not alone or not comes_soon

    def give_back(self, span: Span) -> None:
        """Hand out again the chunks of a range that have not come."""
        with self._lock:
            for chunk in span.chunks:
                self._taken[chunk] = self._writer.present(chunk)
                self._handed_out_bytes -= 0 if self._taken[chunk] else self._chunks.size(chunk)
            self._next = 0
            self._skip_taken()

    def _leaves_room(self, asked: int | None, awaited: Collection[int]) -> bool:
        """Return whether to wait because urgent chunks are under way, from which any other would take bandwidth.

        After the last urgent chunk, the load is demoted to a background one.
        """
        chunk = self._pending[self._next] if asked is None else asked
        if not self._urgent or chunk in self._urgent or asked in awaited:
            return False
        self._urgent = frozenset(chunk for chunk in self._urgent if not self._writer.present(chunk))
        if not self._urgent and self._load is not None:
            self._load.demote()
        return bool(self._urgent)

    def _share(self, asked: int | None, awaited: Collection[int]) -> float:
        """Return the share of the link that the next range may have: 1 if a reader waits for it or has hinted at it."""
        first = self._pending[self._next] if asked is None else asked
        share = 1.0 if first in self._urgent or asked is not None else self._writer.demand.share
        if share == 1.0 and not awaited:
            self._link_bytes_per_s = None
        elif self._link_bytes_per_s is None:
            self._link_bytes_per_s = self.flights.average_bytes_per_s
        return share

    def _take_paced(self, asked: int | None, share: float) -> Span:
        span = self._take(asked, len(self._pending))
        if self._link_bytes_per_s:
            seconds = span.length * self._chunks.chunk_bytes / self._link_bytes_per_s / share
            self._paced_until = max(self._paced_until, time.monotonic() - _LATE_S) + seconds
        return span

    def _must_wait(self, asked: int | None, awaited: Collection[int]) -> bool:
        if asked not in awaited and self._is_far_ahead():
            return True
        return not awaited and self._is_less_important() and self.flights.count > 0

    def _is_far_ahead(self) -> bool:
        """Return whether the reader must free memory first. What was given back comes before what is there already."""
        released = self._writer.released_bytes
        if self._next < self._furthest or not (released or self._most_ahead < math.inf):
            return False
        most = UNRELEASED_BYTES + self._writer.index.largest_tensor_bytes if released else self._most_ahead
        if self._writer.fetched_bytes - released > most:
            return True
        return self._handed_out_bytes - released > most + UNRELEASED_BYTES

    def _is_less_important(self) -> bool:
        """Return whether this is a background load while an interactive one is under way."""
        load = self._load
        if load is None or not load.background:
            return False
        if self._writer.demand.promoted:
            load.promote()
            return False
        return is_interactive_load_running()

    def _take(self, asked: int | None, connections: int) -> Span:
        """Take a range from the chunk ``asked`` on, or else the next one. ``connections`` is 0 for a whole range."""
        first = self._pending[self._next] if asked is None else asked
        most = (_LARGEST_SPAN_BYTES if connections else self._whole_bytes(first)) // self._chunks.chunk_bytes
        if connections:
            most = min(most, self.flights.range_bytes(connections, _LARGEST_SPAN_BYTES) // self._chunks.chunk_bytes)
            left = sum(not self._taken[chunk] for chunk in self._urgent) if first in self._urgent else 0
            most = max(min(most, (left or len(self._pending) - self._next) // (2 * connections)), 1)
        count = 1
        while count < most and self._follows(first, count, in_order=asked is None):
            count += 1
        self._taken[first : first + count] = b"\1" * count
        self._skip_taken()
        span = Span(first, count)
        self._handed_out_bytes += sum(map(self._chunks.size, span.chunks))
        if count * self._chunks.chunk_bytes > _LARGEST_SPAN_BYTES:
            self.large, self._most_bytes = span, _LARGEST_SPAN_BYTES
        return span

    def _skip_taken(self) -> None:
        while self._next < len(self._pending) and self._taken[self._pending[self._next]]:
            self._next += 1
        self._furthest = max(self._furthest, self._next)

    def _whole_bytes(self, first: int) -> int:
        """Return the most bytes of a whole range. Only a range in order can be the large one."""
        return self._most_bytes if first == self._pending[self._next] else _LARGEST_SPAN_BYTES

    def _follows(self, first: int, count: int, *, in_order: bool) -> bool:
        """Return whether a range of ``count`` chunks may have one more."""
        chunk, position = first + count, self._next + count
        if chunk >= self._chunks.count or self._taken[chunk] or (chunk in self._urgent) != (first in self._urgent):
            return False
        if self._chunks.shard_range(chunk).shard != self._chunks.shard_range(first).shard:
            return False
        return not in_order or (position < len(self._pending) and self._pending[position] == chunk)

    def awaited(self) -> list[int]:
        """Return the chunks that forwards wait for and that are not there."""
        return [chunk for run in self._writer.demanded() for chunk in run if not self._writer.present(chunk)]

    def stragglers(self, *, patient: bool = False) -> list[InFlightRange]:
        """Return the late ranges that may be hedged now, first those that a forward waits for.

        A range that no forward waits for is hedged only if nothing of it has come, so that the hedge takes no bandwidth
        from the first request. When nothing else is left to fetch, every range counts as waited for, and is late
        earlier; with ``patient``, neither is so.
        """
        ending = self.exhausted and not patient
        late = self.flights.stragglers(ending=ending)
        if late and not ending:
            awaited = set(self.awaited())
            for flight in late:
                flight.awaited = not awaited.isdisjoint(flight.span.chunks)
            late = [flight for flight in late if flight.awaited or flight.first_s is None]
            late.sort(key=lambda flight: not flight.awaited)
        return late[: self.flights.hedge_budget(ending=ending)] if late else []

    def stop(self) -> None:
        """Hand out no more ranges. Every connection ends after its present one."""
        with self._lock:
            self._stopped = True
