"""The ranges that are being fetched, and which of them are late (Cicada §3.5, Algorithm 1)."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import nlargest
from typing import NamedTuple

_SLACK = 2.0  # a range may take this many times as long as the average, plus a constant
_SLACK_S = 0.25
_SLACK_FIRST = 4.0  # the same for the first byte, compared with other ranges' first bytes
_SLACK_FIRST_S = 0.05
_SLACK_LAST = 1.5  # the same once nothing else is left to fetch, so that a hedge takes no bandwidth from others
_SLACK_LAST_S = 0.02
_WEIGHT = 0.3  # the share of the newest range in the measured rate
# How long a range should take: this long, or this many times the time until an answer begins. Ranges in flight arrive
# together, and not in the order in which they are needed, so they should be short. But each of them waits for its
# answer to begin, so they should not be too short.
_RANGE_S, _ANSWERS = 0.1, 8
_FIRST_BYTES = 2 << 20  # the size of a range before any rate is known
_BURST_S = 0.05  # bytes that come in less time say nothing about the link: they were already on their way, or buffered
_LOOK_S = 0.01
_LATER_ANSWERS = 2  # an answer is late if this many ranges that were begun later have been answered
_RANGES_PER_HEDGE = 4  # one in this many ranges may have a second request at the same time


class Span(NamedTuple):
    """Neighbouring chunks of one shard, which one request covers."""

    first: int
    length: int

    @property
    def chunks(self) -> range:
        return range(self.first, self.first + self.length)

    def overlaps(self, other: Span) -> bool:
        return self.first < other.first + other.length and other.first < self.first + self.length


class OvertakenError(Exception):
    """Another request for the same range was faster."""


@dataclass(eq=False)
class InFlightRange:
    """One request for a range. Of its ``size_bytes``, ``done_bytes`` have come.

    If this is a hedge (a second request for a late range), ``first_request`` is the first one. ``took_over`` says that
    the hedge has taken over from it. ``writing`` is held while the region is changed; an ``overtaken`` request does not
    change it any more.
    """

    span: Span
    size_bytes: int
    thread: int = field(default_factory=threading.get_ident)
    began: float = field(default_factory=time.monotonic)
    done_bytes: int = 0
    hedged: bool = False  # a second request was made for the same range
    is_hedge: bool = False  # this is such a second request
    awaited: bool = False  # a forward waits for it
    was_paused: bool = False  # it was paused, so its time says nothing about the link
    first_s: float | None = None  # how long the first bytes took
    first_request: InFlightRange | None = None
    took_over: bool = False
    direct: bool = True  # the store writes straight into the region
    overtaken: bool = False
    writing: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def left_bytes(self) -> int:
        """The bytes that have not come yet."""
        return self.size_bytes - self.done_bytes

    def advance(self, done_bytes: int) -> None:
        if self.first_s is None and done_bytes:
            self.first_s = time.monotonic() - self.began
        self.done_bytes = done_bytes

    def pause(self, seconds: float) -> None:
        """Do not count this time, in which the range was paused in favour of another one."""
        self.was_paused = True
        self.began += seconds

    def rate(self, now: float) -> float:
        """Return the bytes a second so far."""
        return self.done_bytes / max(now - self.began, 1e-6)


class InFlightRanges:
    """All ranges in flight. They are also measured, to know the usual rate and the usual time to a first byte."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_flight: list[InFlightRange] = []
        self._bytes_per_s: float | None = None
        self._first_s: float | None = None
        self._least_s = math.inf  # the shortest time until an answer began: the store's latency, without queueing
        self._began = 0.0
        self._done_bytes = 0  # of ranges that have ended
        self._answered: list[float] = []  # when the newest _LATER_ANSWERS of the answered ranges were begun

    def begin(self, span: Span, size_bytes: int, *, is_hedge: bool = False) -> InFlightRange:
        flight = InFlightRange(span, size_bytes, is_hedge=is_hedge)
        with self._lock:
            self._began = self._began or flight.began
            self._in_flight.append(flight)
        return flight

    def end(self, flight: InFlightRange) -> bool:
        """End a request, and return whether no other one is fetching any of its range."""
        with self._lock:
            self._in_flight.remove(flight)
            flight.ended.set()
            self._done_bytes += flight.done_bytes
            if flight.first_s is not None:
                self._least_s = min(self._least_s, flight.first_s)
                self._answered = nlargest(_LATER_ANSWERS, (*self._answered, flight.began))
            seconds = time.monotonic() - flight.began
            if flight.done_bytes == flight.size_bytes and seconds > 0 and not flight.was_paused:
                self._bytes_per_s = _averaged(self._bytes_per_s, flight.size_bytes / seconds)
                if flight.first_s is not None and not flight.is_hedge:
                    self._first_s = _averaged(self._first_s, flight.first_s)
            return not any(flight.span.overlaps(other.span) for other in self._in_flight)

    def take_over(self, late: InFlightRange, interrupt: Callable[[int], None], is_over: Callable[[], bool]) -> None:
        """End a range's first request, and wait until its store can no longer be writing into the region.

        Raises OvertakenError if the fetch is over before that.
        """
        if late.first_request is not None:
            self.take_over(late.first_request, interrupt, is_over)
        with late.writing:
            late.overtaken = True
        while not late.ended.is_set():
            with self._lock:  # so that the thread cannot begin another range before it is interrupted
                if late in self._in_flight:
                    interrupt(late.thread)
            if not late.direct or late.ended.wait(_LOOK_S):
                return
            if is_over():
                raise OvertakenError

    def interrupt(self, is_present: Callable[[Span], bool], interrupt: Callable[[int], None]) -> None:
        """Interrupt the threads whose ranges another request has brought."""
        with self._lock:  # so that no thread can begin another range before it is interrupted
            for flight in self._in_flight:
                if (flight.hedged or flight.is_hedge) and is_present(flight.span):
                    interrupt(flight.thread)

    @property
    def count(self) -> int:
        return len(self._in_flight)

    @property
    def average_bytes_per_s(self) -> float | None:
        """The bytes a second since the first range was begun; None before anything has come."""
        with self._lock:
            done_bytes = self._done_bytes + sum(flight.done_bytes for flight in self._in_flight)
            return done_bytes / max(time.monotonic() - self._began, _BURST_S) if done_bytes else None

    def range_bytes(self, connections: int, largest: int) -> int:
        """Return the size of a range that one of the ``connections`` receives soon, at most ``largest`` bytes."""
        now = time.monotonic()
        with self._lock:
            done_bytes = self._done_bytes + sum(flight.done_bytes for flight in self._in_flight)
            present = sum(flight.done_bytes / max(now - flight.began, _BURST_S) for flight in self._in_flight)
            seconds = max(_RANGE_S, _ANSWERS * self._least_s) if self._least_s < math.inf else _RANGE_S
        if not done_bytes:
            return min(_FIRST_BYTES, largest)
        # The present rate may be higher than the average, if the fetch was held up by others.
        rate = max(present, done_bytes / max(now - self._began, _BURST_S))
        return min(int(rate * seconds / connections), largest)

    def hedge_budget(self, *, ending: bool = False) -> int:
        """Return how many more ranges may be hedged. Each hedge takes bandwidth from the first requests."""
        with self._lock:
            if ending:
                return len(self._in_flight)
            hedges = sum(flight.is_hedge for flight in self._in_flight)
            return max(max((len(self._in_flight) - hedges) // _RANGES_PER_HEDGE, 1) - hedges, 0)

    def stragglers(self, *, ending: bool = False) -> list[InFlightRange]:
        """Return the ranges without a hedge that are late, compared with the others.

        ``ending`` says that every range has been begun.

        A link that all ranges share slows all of them down, the more so with each new connection. So a range is
        compared with those that are now in flight, and not only with earlier ones.
        """
        now = time.monotonic()
        with self._lock:
            flying, rate, first_s = list(self._in_flight), self._bytes_per_s, self._first_s
            answered = (*self._answered, *(flight.began for flight in flying if flight.first_s is not None))
        # If hardly any later request was answered, it is not this answer that is slow, but the link or the store.
        overtaken = math.inf if ending else min(nlargest(_LATER_ANSWERS, (*answered, *[-math.inf] * _LATER_ANSWERS)))
        rates = sorted((flight.rate(now), id(flight)) for flight in flying if flight.done_bytes)
        places = {flight: place for place, (_, flight) in enumerate(rates)}
        late = []
        for flight in flying:
            usual = min(filter(None, (rate, _median_without(rates, places.get(id(flight))))), default=None)
            if usual and not flight.hedged:
                patience_s = _patience_s(flight, usual, first_s if flight.began < overtaken else None, ending)
                if now - flight.began > patience_s:
                    late.append(flight)
        return late


def _median_without(rates: list[tuple[float, int]], place: int | None) -> float | None:
    """Return the (upper) median of sorted rates, without the one at ``place``."""
    count = len(rates) - (place is not None)
    if not count:
        return None
    middle = count // 2
    return rates[middle if place is None or middle < place else middle + 1][0]


def _averaged(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)


def _patience_s(flight: InFlightRange, rate: float, first_s: float | None, ending: bool) -> float:
    """Return how long a range may take before it is late. If not even its first byte has come, that is much shorter."""
    whole_s = _SLACK * flight.size_bytes / rate + _SLACK_S
    if flight.first_s is not None or first_s is None:
        return whole_s
    if ending:
        return min(whole_s, _SLACK_LAST * first_s + _SLACK_LAST_S)
    return min(whole_s, _SLACK_FIRST * first_s + _SLACK_FIRST_S)
