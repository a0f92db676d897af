"""The connections of one fetch, each of which fetches ranges into the region. There are as many as make it faster."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Protocol

from ..checkpoint.checksums import Checksums
from ..checkpoint.index import WeightIndex
from ..container_limits import cpu_count
from ..errors import CorruptError, MedusaError, StorageError
from ..process_limits import as_limit_error
from ..region.writer import RegionWriter
from ..storage.base import Store
from ..storage.framing import import_xxh3_64
from .in_flight import InFlightRange, OvertakenError, Span
from .range_writer import RangeWriter
from .schedule import Schedule

logger = logging.getLogger(__name__)

# Numbers of connections: at first as many as this machine's CPUs can feed, then as many as help with slow stores.
_FEWEST, _FIRST, _SECOND, _MOST = 2, 4, 16, 32
_FAST_BYTES_PER_S = 300e6  # a connection as fast as this is limited by the CPUs, not by the store
_LOOK_S = 0.005
_WINDOW_S = 0.03  # how long to measure at first
# Measure until this much has come, or for this long: less says nothing, because slow links deliver in bursts.
_SAMPLE_BYTES, _LONGEST_WINDOW_S = 1 << 20, 0.5
_LATER_WINDOW_S = 0.1  # how long to measure after more connections were opened; then there is no hurry
_BUSY = 0.7  # threads that run, or wait to run, for a larger share of all CPUs' time are limited by the CPUs
_GAIN = 1.2  # the factor by which more connections must speed up the fetch for still more to be opened
_LOSS = 1.05  # the factor by which they must speed it up to be kept
_CHUNK_S = 0.5  # connections that each need longer than this for a chunk are kept only if they help
_DELIVERING_S = 1.0  # how long to wait for a new connection to bring something before measuring
_SOON_S = 1.0  # a fetch that ends within this time is not worth the largest number of connections
_SUSPEND_S = 2.0  # the longest time for which other ranges are suspended for a late one; less than any store's patience
_SILENT_S = 1.0  # how long to wait before a hedge, if the store sends one copy for many nodes
_END_S = 0.2  # how long to wait for connections to end when everything is there; one that hangs is left behind
_SCRATCH_BYTES = 256 << 10  # small enough to stay in a core's cache between receiving and writing


class ChecksumMismatch(Exception):
    """The checksum of a chunk is wrong."""

    def __init__(self, chunk: int) -> None:
        super().__init__(str(chunk))
        self.chunk = chunk


class _GivenBack(Exception):
    """The rest of a range is to be fetched later, because something else comes first."""


class PeerSource(Protocol):
    """What a store with several sources decides by itself (``storage.sources.SourcesStore``)."""

    @property
    def connections(self) -> int | None:
        """How many connections to have, or None to measure. With a number, the store itself deals with late answers."""

    def checksum(self, key: str, start: int) -> int | None:
        """Return the checksum that came with the chunk at ``start``, or None."""


class Streams:
    """Fetches all ranges of a schedule.

    ``fixed_connections`` is the number of connections; None measures and adapts it. ``nice`` is added to the threads'
    niceness. ``peers`` is the store, if it is one with several sources.
    """

    def __init__(
        self,
        store: Store,
        index: WeightIndex,
        writer: RegionWriter,
        schedule: Schedule,
        *,
        fixed_connections: int | None = None,
        checksums: Checksums | None = None,
        nice: int = 0,
        peers: PeerSource | None = None,
    ) -> None:
        self._store = store
        self._peers = peers
        self._checksum = import_xxh3_64() if writer.has_checksums else None
        self._index = index
        self._writer = writer
        self._schedule = schedule
        self._fixed = fixed_connections
        self._checksums = checksums
        self._nice = nice
        self._threads: list[threading.Thread] = []
        self._opened = 0
        self._target = 0  # how many connections take ranges; those with a higher number end
        self._received = 0  # bytes of all connections; changed under the lock
        self._delivering: set[int] = set()  # the threads that have received something
        self._lock = threading.Lock()
        self._local = threading.local()
        self._error: BaseException | None = None
        self._changed = threading.Event()
        self._over = threading.Event()  # set when the fetch is over, so that no thread sleeps on
        self._working = 0
        self._late: InFlightRange | None = None  # the hedge for which other ranges are suspended
        self._late_until = 0.0
        self.hedges = 0

    @property
    def connections(self) -> int:
        """The number of connections that were opened, without those of hedges."""
        return self._opened

    def run(self) -> None:
        """Fetch until everything is published. Raises the first error of any connection."""
        from_peers = self._peer_connections()
        monitor = threading.Thread(target=self._watch, name="hedge", daemon=True)
        try:
            if from_peers:
                self._run_peers(self._fixed or from_peers)
            if not from_peers or self._alive():  # only the object store is left
                self._open_connections(self._fixed or min(max(cpu_count(), _FEWEST), _FIRST))
                with suppress(RuntimeError):  # this process may have no more threads; then nothing is hedged
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
                # A stalled thread ends with its own timeout, or with the process.
                if thread.ident is not None:
                    thread.join(2.0 if deadline is None else max(deadline - time.monotonic(), 0.0))
        if self._error is not None and not self._writer.complete:
            raise self._error

    def _run_peers(self, connections: int) -> None:
        """Fetch as long as there are peers: over one connection, and over all once something has come.

        In a chain, many machines begin at the same time, and whatever the first chunk does not need can wait.
        """
        self._open_connections(1)
        while self._alive() and self._peer_connections():
            self._changed.wait(0.5)
            self._changed.clear()
            self._open_connections(connections)

    def _peer_connections(self) -> int | None:
        """Return the number of connections that peers should be read with, or None without peers."""
        return None if self._peers is None else self._peers.connections

    def _watch(self) -> None:
        """Request late ranges a second time. If a forward waits for one, suspend the others (Cicada, Algorithm 1)."""
        while self._alive():
            for flight in self._late_ranges():
                flight.hedged = True
                try:
                    self._start(partial(self._hedge, flight))
                except RuntimeError:  # this process may have no more threads; the first request goes on alone
                    flight.hedged = False
                    break
                self.hedges += 1
            self._over.wait(_LOOK_S)

    def _late_ranges(self) -> list[InFlightRange]:
        """Return the ranges to hedge. In a cluster, not those that are only slow: its store sends one copy for all."""
        if self._peer_connections():
            return []
        if self._peers is None:
            return self._schedule.stragglers()
        silent_since = time.monotonic() - _SILENT_S
        late = self._schedule.stragglers(patient=True)
        return [flight for flight in late if flight.awaited or (flight.first_s is None and flight.began < silent_since)]

    def _hedge(self, late: InFlightRange) -> None:
        if self._store.interruptible and not self._store.reuses_buffer:  # it will write into the region at once
            try:
                self._take_over(late)
            except OvertakenError:
                return
        stop = late.span.first + late.span.length
        missing = [chunk for chunk in late.span.chunks if not self._writer.present(chunk)]
        if missing:
            self._fetch(Span(missing[0], stop - missing[0]), late)

    def _begun_bytes(self, chunk: int, late: InFlightRange) -> int:
        """Return how many bytes of its first missing chunk a late range has brought. Its hedge begins behind them.

        With peers, it is 0: they send whole chunks, each with its checksum.
        """
        chunks = self._writer.chunks
        if self._peers is not None or not late.span.first <= chunk < late.span.first + late.span.length:
            return 0
        begun = late.done_bytes - (chunks.shard_range(chunk).start - chunks.shard_range(late.span.first).start)
        return begun if 0 < begun < chunks.size(chunk) else 0

    def _suspend(self, flight: InFlightRange) -> None:
        """Suspend this range while a late one, which a forward waits for, is being hedged."""
        late = self._late
        if late is None or flight.is_hedge:
            return
        begin = time.monotonic()
        while self._alive() and time.monotonic() < self._late_until and not self._is_present(late.span):
            time.sleep(1e-3)
        flight.pause(time.monotonic() - begin)
        self._late = None

    def _is_present(self, span: Span) -> bool:
        return all(self._writer.present(chunk) for chunk in span.chunks)

    def _alive(self) -> bool:
        return self._error is None and self._working > 0 and not self._schedule.complete

    def _open_connections(self, count: int) -> None:
        """Open connections until there are ``count``, or as many as this process may have threads.

        Raises RuntimeError if it may have no further one, and none is open.
        """
        self._target = count
        while self._opened < count:
            try:
                self._start(partial(self._take_all, self._opened))
            except RuntimeError as error:
                if not self._opened:
                    raise
                logger.info("fetching over %d connections instead of %d: %s", self._opened, count, error)
                self._target = self._opened
                return
            self._opened += 1

    def _start(self, work: Callable[[], None]) -> None:
        """Start a thread. Raises RuntimeError if this process may have no more of them."""
        thread = threading.Thread(target=self._work, args=(work,), name=f"fetch-{len(self._threads)}", daemon=True)
        with self._lock:
            self._working += 1
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._working -= 1
            raise
        self._threads.append(thread)

    def _adapt(self) -> None:
        """Open more connections while the store, not this machine, is the limit and the last ones sped up the fetch.

        Connections that only took CPU time from the others end. Those that share a link stay, because they hide late
        answers. But if the link is so slow that each of them would need long for a chunk, they end, too: the layers
        that come next would have to wait for them.
        """
        before, fewer, window_s = 0.0, self._target, _WINDOW_S
        for count in (_SECOND, _MOST, None):
            if not self._alive() or self._schedule.exhausted:
                return
            busy_s, begin = self._busy_s(), time.monotonic()
            rate = self._measure(window_s)
            if rate is None:
                return
            busy = (self._busy_s() - busy_s) / (time.monotonic() - begin)
            short = busy > _BUSY * min(self._target, cpu_count())  # CPU time is short; the connections could bring more
            crowded = rate / self._target * _CHUNK_S < self._writer.chunks.chunk_bytes
            if (short and rate < before * _LOSS) or (crowded and rate < before * _GAIN):
                self._target = fewer
            if short or count is None or rate / self._target > _FAST_BYTES_PER_S or rate < before * _GAIN:
                return
            if count == _MOST and self._schedule.left_bytes < rate * _SOON_S:
                return
            before, fewer, window_s = rate, self._target, _LATER_WINDOW_S
            self._open_connections(count)

    def _busy_s(self) -> float:
        """Return the sum of the seconds for which the connections' threads have run or waited for a CPU."""
        total_ns = 0
        for thread in self._threads:
            try:
                with open(f"/proc/self/task/{thread.native_id}/schedstat") as stat:
                    ran, waited, _ = stat.read().split()
            except (OSError, ValueError):
                continue  # the thread has ended, or this kernel does not count
            total_ns += int(ran) + int(waited)
        return total_ns / 1e9

    def _measure(self, window_s: float) -> float | None:
        """Measure the bytes a second of all connections, once each is up to speed. None if the fetch is over."""
        deadline = time.monotonic() + _DELIVERING_S
        while len(self._delivering) < self._target and time.monotonic() < deadline:  # handshakes and slow start
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
        while number < self._target:
            span = self._schedule.take(self._target, whole=self._peer_connections() is not None)
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
        """Fetch one range, unless another request for it is faster. For a hedge, ``late`` is the first request."""
        chunks = self._writer.chunks
        size_bytes = chunks.shard_range(span.first + span.length - 1).stop - chunks.shard_range(span.first).start
        flights, failure, given_back = self._schedule.flights, None, False
        begun = 0 if late is None else self._begun_bytes(span.first, late)
        flight = flights.begin(span, size_bytes - begun, is_hedge=late is not None)
        flight.first_request, flight.took_over = late, late is not None and late.overtaken
        flight.awaited = late is not None and late.awaited
        try:
            self._fetch_verified(span, flight, begun)
        except OvertakenError:
            pass
        except _GivenBack:
            given_back = True
        except Exception as error:  # noqa: BLE001  raised below, unless another request brings the range
            failure = error
        alone = flights.end(flight)
        if given_back and not flight.hedged:
            self._schedule.give_back(span)
        if failure and alone and not flight.overtaken and not self._is_present(span):
            raise failure
        if flight.hedged or flight.is_hedge:
            flights.interrupt(self._is_present, self._store.interrupt)

    def _fetch_verified(self, span: Span, flight: InFlightRange, begun: int) -> None:
        """Fetch one range. A chunk with a wrong checksum is fetched once more; the second time it is an error."""
        again: int | None = None
        while True:
            try:
                self._fetch_once(span, flight, begun)
                return
            except ChecksumMismatch as wrong:
                chunks = self._writer.chunks
                place = chunks.shard_range(wrong.chunk)
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
        """Fetch a range. Another request has already brought its first ``begun`` bytes into the region."""
        chunks = self._writer.chunks
        place = chunks.shard_range(span.first)
        shard = self._index.shards[place.shard]
        start = shard.data_start + place.start

        def publish(chunk: int, first: int, end: int) -> None:
            checksums = self._checksums
            if checksums and not checksums.matches(chunk, buffer[first:end]):
                raise ChecksumMismatch(chunk)
            self._publish(chunk, shard.name, start + first, buffer[first:end])

        def advance(more: int) -> None:
            self._count(flight, range_writer, begun + more)
            if (flight.hedged or flight.is_hedge) and not range_writer.complete and self._is_present(span):
                raise OvertakenError
            if flight.is_hedge and flight.awaited and self._late is not flight:
                self._late, self._late_until = flight, time.monotonic() + _SUSPEND_S
            self._suspend(flight)
            range_writer.publish(prepare=flight.direct)
            large = span is self._schedule.large and not flight.hedged
            if large and self._schedule.should_give_back(alone=self._peer_connections() is not None):
                raise _GivenBack

        def keep(more: int) -> None:
            at = (range_writer.filled - begun) % len(own)
            range_writer.write(own[at : at + begun + more - range_writer.filled])
            advance(more)

        range_writer = RangeWriter(
            self._writer,
            span,
            flight,
            begun=begun,
            publish=publish,
            take_over=partial(self._take_over, flight.first_request),
        )
        with flight.writing:
            if flight.overtaken:
                raise OvertakenError
            flight.direct = self._is_direct(flight)
        left = range_writer.size_bytes - begun
        with self._writer.buffer(span.first, span.length) as buffer:
            if flight.direct:
                self._writer.prepare(span.first)
                self._store.read_into(shard.name, start + begun, buffer[begun:], shard.version, advance)
            else:
                own = self._scratch()[:left] if self._store.reuses_buffer else memoryview(bytearray(left))
                self._store.read_into(shard.name, start + begun, own, shard.version, keep, left)

    def _is_direct(self, flight: InFlightRange) -> bool:
        """Return whether the store may write straight into the region.

        It must stop soon if another request takes over.
        """
        if not self._store.interruptible:
            return False
        return not self._store.reuses_buffer or (self._writer.direct and not flight.is_hedge)

    def _take_over(self, late: InFlightRange | None) -> None:
        """End the first request for a range, so that its hedge can go on. OvertakenError if the fetch is over."""
        assert late is not None
        self._schedule.flights.take_over(late, self._store.interrupt, self._over.is_set)

    def _count(self, flight: InFlightRange, range_writer: RangeWriter, filled: int) -> None:
        with self._lock:
            self._received += filled - range_writer.filled
            self._writer.count_received(filled - range_writer.filled)
            if not self._delivering:
                self._changed.set()
            self._delivering.add(threading.get_ident())
        range_writer.filled = filled
        flight.advance(flight.size_bytes - range_writer.size_bytes + filled)

    def _publish(self, chunk: int, key: str, start: int, data: memoryview) -> None:
        """Publish a chunk: the bytes of the shard ``key`` from ``start`` on."""
        checksum = None
        if self._checksum is not None:
            checksum = None if self._peers is None else self._peers.checksum(key, start)
            checksum = self._checksum(data) if checksum is None else checksum
        self._writer.publish(chunk, checksum)

    def _scratch(self) -> memoryview:
        """Return this thread's buffer for bytes that are received and then written to the region."""
        if not hasattr(self._local, "scratch"):
            self._local.scratch = memoryview(bytearray(_SCRATCH_BYTES))
        scratch: memoryview = self._local.scratch
        return scratch


def as_medusa_error(error: BaseException) -> MedusaError:
    """Return a MedusaError unchanged, and for any other error one that can be sent to other processes."""
    if isinstance(error, MedusaError):
        return error
    return as_limit_error(error) or StorageError(f"the fetch failed: {type(error).__name__}: {error}")
