"""The connections of one fetch: as many as make it faster, each of which fetches ranges into the region."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Protocol

from ..checkpoint.checksums import Checksums
from ..checkpoint.index import WeightIndex
from ..errors import CorruptError, MedusaError, StorageError
from ..limits import cpu_count
from ..region.writer import RegionWriter
from ..resource_limits import as_limit_error
from ..storage.base import Store
from ..storage.framing import checksum_function
from .arrival import Arrival
from .in_flight import InFlightRange, OvertakenError, Span
from .schedule import Schedule

logger = logging.getLogger(__name__)

# Numbers of connections: at first as many as this machine's CPUs can feed, then as many as help with slow stores.
_FEWEST, _FIRST, _SECOND, _MOST = 2, 4, 16, 32
_FAST_BYTES_PER_S = 300e6  # a connection as quick as this is limited by CPUs, not by the store
_LOOK_S = 0.005
_WINDOW_S = 0.03
_SAMPLE_BYTES, _LONGEST_WINDOW_S = 1 << 20, 0.5  # less says nothing: slow links bring what they have saved up at once
_LATER_WINDOW_S = 0.1  # after more connections were opened: only a loss would have to be undone
_BUSY = 0.7  # threads that run, or wait to run, for a larger share of all CPUs' time are limited by the CPUs
_GAIN = 1.2  # what more connections must bring for still more to be opened
_LOSS = 1.05  # what they must bring at least to be kept
_CHUNK_S = 0.5  # more connections than can bring a chunk in this time are kept only where they help
_HEARD_S = 1.0  # within which a connection that was opened should have brought something
_SOON_S = 1.0  # a fetch that ends within this time is not worth more connections than the second step
_HOLD_S = 2.0  # how long other ranges are suspended at most for one that is late; less than any store's patience
_SILENT_S = 1.0  # before a store that sends one copy for many nodes is asked for a range again
_END_S = 0.2  # for connections to end when everything is there; one that hangs is left behind
_SCRATCH_BYTES = 256 << 10  # stays in a core's cache between the receiving and the writing


class Mismatch(Exception):
    """The checksum of a chunk is wrong."""

    def __init__(self, chunk: int) -> None:
        super().__init__(str(chunk))
        self.chunk = chunk


class _GivenBack(Exception):
    """The rest of a range is fetched later: something else comes first."""


class Peers(Protocol):
    """What a store of several machines decides by itself: ``storage.sources.SourcesStore``."""

    @property
    def connections(self) -> int | None:
        """How many connections to have; None: measure. With a number, the store itself sees to late answers."""

    def checksum(self, key: str, start: int) -> int | None:
        """Return the checksum with which the chunk at ``start`` came, if it came with one."""


class Streams:
    """Fetches all ranges of a schedule. ``fixed`` is a number of connections; None measures and adapts.

    ``nice`` is added to the threads' niceness. ``peers``: the store, where it is one of several machines.
    """

    def __init__(
        self,
        store: Store,
        index: WeightIndex,
        writer: RegionWriter,
        schedule: Schedule,
        *,
        fixed: int | None = None,
        checksums: Checksums | None = None,
        nice: int = 0,
        peers: Peers | None = None,
    ) -> None:
        self._store = store
        self._peers = peers
        self._checksum = checksum_function() if writer.has_checksums else None
        self._index = index
        self._writer = writer
        self._schedule = schedule
        self._fixed = fixed
        self._checksums = checksums
        self._nice = nice
        self._threads: list[threading.Thread] = []
        self._wanted = 0  # connections that take ranges; those above it end
        self._received = 0  # a sum of all connections; counted under the lock
        self._heard: set[int] = set()  # the threads that have received something
        self._lock = threading.Lock()
        self._local = threading.local()
        self._error: BaseException | None = None
        self._changed = threading.Event()
        self._over = threading.Event()  # the fetch is, and nobody should sleep on
        self._working = 0
        self._late: InFlightRange | None = None  # for which other ranges are suspended
        self._late_until = 0.0
        self.hedges = 0

    @property
    def connections(self) -> int:
        """The number of connections that were opened, without those of second requests."""
        return len(self._threads) - self.hedges

    def run(self) -> None:
        """Fetch until everything is published. Raises the first error of any connection."""
        few = self._few()
        monitor = threading.Thread(target=self._watch, name="hedge", daemon=True)
        try:
            if few:
                self._run_peers(self._fixed or few)
            if not few or self._alive():  # the object store is all that is left
                self._grow(self._fixed or min(max(cpu_count(), _FEWEST), _FIRST))
                monitor.start()
                if self._fixed is None:
                    self._adapt()
            while self._alive():
                self._changed.wait(0.5)
                self._changed.clear()
        finally:
            self._schedule.stop()
            self._over.set()
            deadline = time.monotonic() + _END_S if self._writer.complete else None
            for thread in chain((monitor,), self._threads):  # the monitor first: it may be about to start another
                # A stalled one ends with its own timeout, or with the process.
                if thread.ident is not None:
                    thread.join(2.0 if deadline is None else max(deadline - time.monotonic(), 0.0))
        if self._error is not None and not self._writer.complete:
            raise self._error

    def _run_peers(self, connections: int) -> None:
        """Fetch for as long as there are peers: over one connection, and over all as soon as something has come.

        In a chain many machines begin at the same time, and what the first chunk does not need can wait.
        """
        self._grow(1)
        while self._alive() and self._few():
            self._changed.wait(0.5)
            self._changed.clear()
            self._grow(connections)

    @property
    def _chunk_bytes(self) -> int:
        return self._writer.chunks.chunk_bytes

    def _few(self) -> int | None:
        """The number of connections that peers want."""
        return None if self._peers is None else self._peers.connections

    def _watch(self) -> None:
        """Request late ranges a second time. If a forward waits for one, suspend the others (Cicada, Algorithm 1)."""
        while self._alive():
            for flight in self._late_ranges():
                flight.hedged = True
                self.hedges += 1
                self._start(partial(self._hedge, flight))
            self._over.wait(_LOOK_S)

    def _late_ranges(self) -> list[InFlightRange]:
        """Ranges to request a second time; in a cluster not those that only flow slowly: its store sends one copy."""
        if self._few():
            return []
        if self._peers is None:
            return self._schedule.late()
        silent_since = time.monotonic() - _SILENT_S
        late = self._schedule.late(patient=True)
        return [flight for flight in late if flight.awaited or (flight.first_s is None and flight.began < silent_since)]

    def _hedge(self, late: InFlightRange) -> None:
        if self._store.interrupts and not self._store.refills:  # it will write into the region at once
            try:
                self._take_over(late)
            except OvertakenError:
                return
        stop = late.span.first + late.span.length
        missing = [chunk for chunk in late.span.chunks if not self._writer.present(chunk)]
        if missing:
            self._fetch(Span(missing[0], stop - missing[0]), late)

    def _begun_bytes(self, chunk: int, late: InFlightRange) -> int:
        """Return how many bytes of its first missing chunk a late range has brought: a second request begins there.

        Peers send whole chunks, each behind its checksum.
        """
        chunks = self._writer.chunks
        if self._peers is not None or not late.span.first <= chunk < late.span.first + late.span.length:
            return 0
        begun = late.done_bytes - (chunks.place(chunk).start - chunks.place(late.span.first).start)
        return begun if 0 < begun < chunks.size(chunk) else 0

    def _hold(self, flight: InFlightRange) -> None:
        """Suspend this range while another one, which a forward waits for, is late."""
        late = self._late
        if late is None or flight.is_hedge:
            return
        begin = time.monotonic()
        while self._alive() and time.monotonic() < self._late_until and not self._there(late.span):
            time.sleep(1e-3)
        flight.pause(time.monotonic() - begin)
        self._late = None

    def _there(self, span: Span) -> bool:
        return all(self._writer.present(chunk) for chunk in span.chunks)

    def _alive(self) -> bool:
        return self._error is None and self._working > 0 and not self._schedule.complete

    def _grow(self, count: int) -> None:
        self._wanted = count
        while (number := self.connections) < count:
            self._start(partial(self._take_all, number))

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._work, args=(work,), name=f"fetch-{len(self._threads)}", daemon=True)
        with self._lock:
            self._working += 1
        self._threads.append(thread)
        thread.start()

    def _adapt(self) -> None:
        """Open more connections while the store, not this machine, limits each and the last ones made the fetch faster.

        Connections that only took CPU time from the others end. Those that share a link stay: they hide late answers.
        But where the link is so slow that a chunk would take each of them long, the layers that come next would wait.
        """
        before, fewer, window_s = 0.0, self._wanted, _WINDOW_S
        for count in (_SECOND, _MOST, None):
            if not self._alive() or self._schedule.exhausted:
                return
            busy_s, begin = self._busy_s(), time.monotonic()
            rate = self._measure(window_s)
            if rate is None:
                return
            busy = (self._busy_s() - busy_s) / (time.monotonic() - begin)
            short = busy > _BUSY * min(self._wanted, cpu_count())  # of CPU time; the connections could bring more
            crowded = rate / self._wanted * _CHUNK_S < self._chunk_bytes
            if (short and rate < before * _LOSS) or (crowded and rate < before * _GAIN):
                self._wanted = fewer
            if short or count is None or rate / self._wanted > _FAST_BYTES_PER_S or rate < before * _GAIN:
                return
            if count == _MOST and self._schedule.left_bytes < rate * _SOON_S:
                return
            before, fewer, window_s = rate, self._wanted, _LATER_WINDOW_S
            self._grow(count)

    def _busy_s(self) -> float:
        """Sum the seconds for which the connections' threads have run or waited for a CPU."""
        total_ns = 0
        for thread in self._threads:
            try:
                with open(f"/proc/self/task/{thread.native_id}/schedstat") as stat:
                    ran, waited, _ = stat.read().split()
            except (OSError, ValueError):
                continue  # it has ended, or this kernel does not count
            total_ns += int(ran) + int(waited)
        return total_ns / 1e9

    def _measure(self, window_s: float) -> float | None:
        """Measure bytes a second over all connections once each is up to speed; None when the fetch is over."""
        deadline = time.monotonic() + _HEARD_S
        while len(self._heard) < self._wanted and time.monotonic() < deadline:  # handshakes and slow start
            if not self._pause():
                return None
        begin, start = time.monotonic(), self._received
        while (passed_s := time.monotonic() - begin) < window_s or (
            self._received - start < _SAMPLE_BYTES and passed_s < _LONGEST_WINDOW_S
        ):
            if not self._pause():
                return None
        return (self._received - start) / passed_s

    def _pause(self) -> bool:
        self._changed.wait(_LOOK_S)
        self._changed.clear()
        return self._alive() and not self._schedule.exhausted

    def _take_all(self, number: int) -> None:
        while number < self._wanted:
            span = self._schedule.take(self._wanted, whole=self._few() is not None)
            if span is None:
                return
            self._fetch(span)

    def _work(self, work: Callable[[], None]) -> None:
        os.nice(self._nice)  # on Linux this concerns only this thread
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised again in the thread that waits
            with self._lock:
                self._error = self._error or error
            self._schedule.stop()
        finally:
            with self._lock:
                self._working -= 1
            self._changed.set()

    def _fetch(self, span: Span, late: InFlightRange | None = None) -> None:
        """Fetch one range, unless another request for it is faster. ``late``: the first request, if this is not it."""
        chunks = self._writer.chunks
        size_bytes = chunks.place(span.first + span.length - 1).stop - chunks.place(span.first).start
        flights, failure, given_back = self._schedule.flights, None, False
        begun = 0 if late is None else self._begun_bytes(span.first, late)
        flight = flights.begin(span, size_bytes - begun, is_hedge=late is not None)
        flight.late, flight.alone = late, late is not None and late.overtaken
        flight.awaited = late is not None and late.awaited
        try:
            self._fetch_right(span, flight, begun)
        except OvertakenError:
            pass
        except _GivenBack:
            given_back = True
        except Exception as error:  # noqa: BLE001  raised below, unless another request brings the range
            failure = error
        alone = flights.end(flight)
        if given_back and not flight.hedged:
            self._schedule.give_back(span)
        if failure and alone and not flight.overtaken and not self._there(span):
            raise failure
        if flight.hedged or flight.is_hedge:
            flights.interrupt(self._there, self._store.interrupt)

    def _fetch_right(self, span: Span, flight: InFlightRange, begun: int) -> None:
        """Fetch one range; a chunk with a wrong checksum is fetched once more, and the second time it is an error."""
        again: int | None = None
        while True:
            try:
                self._fetch_once(span, flight, begun)
                return
            except Mismatch as wrong:
                chunks = self._writer.chunks
                place = chunks.place(wrong.chunk)
                where = f"{self._index.shards[place.shard].name}, bytes {place.start} to {place.stop} of its data"
                checksums = self._checksums  # None: another connection has just found that they belong to other weights
                if wrong.chunk == again and checksums and checksums.pinned:
                    raise CorruptError(
                        f"{where}: the checksum is wrong, also when fetched again; upload the checkpoint again, "
                        "or materialize its state again"
                    ) from None
                if wrong.chunk == again and checksums:
                    logger.warning("the recorded checksums belong to other weights; not verifying by them any more")
                    self._checksums = None
                elif checksums:
                    logger.warning("%s: the checksum is wrong; fetching it again", where)
                again, begun = wrong.chunk, 0
                span = Span(wrong.chunk, span.first + span.length - wrong.chunk)

    def _fetch_once(self, span: Span, flight: InFlightRange, begun: int) -> None:
        """Fetch a range, of which another request has brought the first ``begun`` bytes into the region."""
        chunks = self._writer.chunks
        place = chunks.place(span.first)
        shard = self._index.shards[place.shard]
        start = shard.data_start + place.start

        def publish(chunk: int, first: int, end: int) -> None:
            checksums = self._checksums
            if checksums and not checksums.right(chunk, buffer[first:end]):
                raise Mismatch(chunk)
            self._publish(chunk, shard.name, start + first, buffer[first:end])

        def advance(more: int) -> None:
            self._count(flight, arrival, begun + more)
            if (flight.hedged or flight.is_hedge) and not arrival.complete and self._there(span):
                raise OvertakenError
            if flight.is_hedge and flight.awaited and self._late is not flight:
                self._late, self._late_until = flight, time.monotonic() + _HOLD_S
            self._hold(flight)
            arrival.publish(prepare=flight.direct)
            large = span is self._schedule.large and not flight.hedged
            if large and self._schedule.gives_way(alone=self._few() is not None):
                raise _GivenBack

        def keep(more: int) -> None:
            at = (arrival.filled - begun) % len(own)
            arrival.write(own[at : at + begun + more - arrival.filled])
            advance(more)

        arrival = Arrival(
            self._writer, span, flight, begun=begun, publish=publish, take_over=partial(self._take_over, flight.late)
        )
        with flight.writing:
            if flight.overtaken:
                raise OvertakenError
            flight.direct = self._is_direct(flight)
        left = arrival.size_bytes - begun
        with self._writer.buffer(span.first, span.length) as buffer:
            if flight.direct:
                self._writer.prepare(span.first)
                self._store.read_into(shard.name, start + begun, buffer[begun:], shard.version, advance)
            else:
                own = self._scratch()[:left] if self._store.refills else memoryview(bytearray(left))
                self._store.read_into(shard.name, start + begun, own, shard.version, keep, left)

    def _is_direct(self, flight: InFlightRange) -> bool:
        """Return whether the store may write into the region: only if it stops when another request takes over."""
        if not self._store.interrupts:
            return False
        return not self._store.refills or (self._writer.direct and not flight.is_hedge)

    def _take_over(self, late: InFlightRange | None) -> None:
        """End the first request for a range, and let the second one go on. OvertakenError at the fetch's end."""
        assert late is not None
        self._schedule.flights.take_over(late, self._store.interrupt, self._over.is_set)

    def _count(self, flight: InFlightRange, arrival: Arrival, filled: int) -> None:
        with self._lock:
            self._received += filled - arrival.filled
            self._writer.receive(filled - arrival.filled)
            if not self._heard:
                self._changed.set()
            self._heard.add(threading.get_ident())
        arrival.filled = filled
        flight.advance(flight.size_bytes - arrival.size_bytes + filled)

    def _publish(self, chunk: int, key: str, start: int, data: memoryview) -> None:
        """Publish a chunk, the bytes from ``start`` on of a shard."""
        checksum = None
        if self._checksum is not None:
            checksum = None if self._peers is None else self._peers.checksum(key, start)
            checksum = self._checksum(data) if checksum is None else checksum
        self._writer.publish(chunk, checksum)

    def _scratch(self) -> memoryview:
        """This thread's buffer for what is received and then written to the region."""
        if not hasattr(self._local, "scratch"):
            self._local.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        scratch: memoryview = self._local.scratch
        return scratch


def as_medusa(error: BaseException) -> MedusaError:
    """Return a MedusaError as it is, and for any other error one that can be passed to other processes."""
    if isinstance(error, MedusaError):
        return error
    return as_limit_error(error) or StorageError(f"the fetch failed: {type(error).__name__}: {error}")
