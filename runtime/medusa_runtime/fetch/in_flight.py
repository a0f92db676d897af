"""The ranges that are being fetched, and which of them are later than their peers (Cicada §3.5, Algorithm 1)."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import nlargest
from typing import NamedTuple

_SLACK = 2.0  # a range may take this many times what ranges take on average
_SLACK_S = 0.25
_SLACK_FIRST = 4.0  # the same for a range without a first byte, compared with the others' first bytes
_SLACK_FIRST_S = 0.05
_SLACK_LAST = 1.5  # the same when nothing else is left to fetch, so that a second request takes nobody's bandwidth
_SLACK_LAST_S = 0.02
_WEIGHT = 0.3  # the share of the newest range in the measured rate
# How long a range should take. Ranges in flight arrive together, and not in the order in which they are needed, so they
# should be short; but each of them waits for its answer to begin, so they should not be too short.
_RANGE_S, _ANSWERS = 0.1, 8
_FIRST_BYTES = 2 << 20  # the size of a range before any rate is known
_BURST_S = 0.05  # bytes that come in less time say nothing about the link: they were on their way, or saved up
_LOOK_S = 0.01
_OVERTAKERS = 2  # an answer is late when this many ranges that were begun later have been answered
_DOUBLED = 4  # one in this many ranges may have a second request at a time


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
    """One range on its way. ``size_bytes`` is all of it, ``done_bytes`` what has come.

    ``late``: the first request, where this is a second one; ``alone``: this one has taken the range over from it.
    ``writing`` is held while the region is changed, and an ``overtaken`` request changes it no more.
    """

    span: Span
    size_bytes: int
    thread: int = field(default_factory=threading.get_ident)
    began: float = field(default_factory=time.monotonic)
    done_bytes: int = 0
    hedged: bool = False  # a second request was made for the same range
    is_hedge: bool = False  # this is such a second request
    awaited: bool = False  # by a forward
    held: bool = False
    first_s: float | None = None  # until its first bytes came
    late: InFlightRange | None = None
    alone: bool = False
    direct: bool = True  # the store itself writes into the region
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
        """Count a pause in favour of another range; it does not make this one late."""
        self.held = True
        self.began += seconds

    def rate(self, now: float) -> float:
        """Bytes a second until now."""
        return self.done_bytes / max(now - self.began, 1e-6)


class InFlightRanges:
    """All ranges in flight. The rate, and how long an answer may take, are measured as ranges come in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flying: list[InFlightRange] = []
        self._bytes_per_s: float | None = None
        self._first_s: float | None = None
        self._least_s = math.inf  # the shortest time until an answer began: the store's own, without queueing
        self._began = 0.0
        self._done_bytes = 0  # of ranges that have ended
        self._answered: list[float] = []  # when the newest _OVERTAKERS of the answered ones began

    def begin(self, span: Span, size_bytes: int, *, is_hedge: bool = False) -> InFlightRange:
        flight = InFlightRange(span, size_bytes, is_hedge=is_hedge)
        with self._lock:
            self._began = self._began or flight.began
            self._flying.append(flight)
        return flight

    def end(self, flight: InFlightRange) -> bool:
        """End a range, and return whether nobody else is fetching it."""
        with self._lock:
            self._flying.remove(flight)
            flight.ended.set()
            self._done_bytes += flight.done_bytes
            if flight.first_s is not None:
                self._least_s = min(self._least_s, flight.first_s)
                self._answered = nlargest(_OVERTAKERS, (*self._answered, flight.began))
            seconds = time.monotonic() - flight.began
            if flight.done_bytes == flight.size_bytes and seconds > 0 and not flight.held:
                self._bytes_per_s = _averaged(self._bytes_per_s, flight.size_bytes / seconds)
                if flight.first_s is not None and not flight.is_hedge:
                    self._first_s = _averaged(self._first_s, flight.first_s)
            return not any(flight.span.overlaps(other.span) for other in self._flying)

    def take_over(self, late: InFlightRange, interrupt: Callable[[int], None], over: Callable[[], bool]) -> None:
        """Have a range's first request end, and wait for that, as its store may be writing into the region right now.

        OvertakenError when the fetch is ``over`` before that.
        """
        if late.late is not None:
            self.take_over(late.late, interrupt, over)
        with late.writing:
            late.overtaken = True
        while not late.ended.is_set():
            with self._lock:  # it begins no other range meanwhile
                if late in self._flying:
                    interrupt(late.thread)
            if not late.direct or late.ended.wait(_LOOK_S):
                return
            if over():
                raise OvertakenError

    def interrupt(self, there: Callable[[Span], bool], interrupt: Callable[[int], None]) -> None:
        """Interrupt the threads whose ranges have come by another request."""
        with self._lock:  # none of them begins another range meanwhile
            for flight in self._flying:
                if (flight.hedged or flight.is_hedge) and there(flight.span):
                    interrupt(flight.thread)

    @property
    def count(self) -> int:
        return len(self._flying)

    @property
    def average_bytes_per_s(self) -> float | None:
        """Bytes a second since the first range was begun; None before anything has come."""
        with self._lock:
            done_bytes = self._done_bytes + sum(flight.done_bytes for flight in self._flying)
            return done_bytes / max(time.monotonic() - self._began, _BURST_S) if done_bytes else None

    def most_bytes(self, takers: int, largest: int) -> int:
        """Return how many bytes a range may have for one of ``takers`` connections to receive it soon."""
        now = time.monotonic()
        with self._lock:
            done_bytes = self._done_bytes + sum(flight.done_bytes for flight in self._flying)
            present = sum(flight.done_bytes / max(now - flight.began, _BURST_S) for flight in self._flying)
            seconds = max(_RANGE_S, _ANSWERS * self._least_s) if self._least_s < math.inf else _RANGE_S
        if not done_bytes:
            return min(_FIRST_BYTES, largest)
        # The fetch may have been held up by others.
        rate = max(present, done_bytes / max(now - self._began, _BURST_S))
        return min(int(rate * seconds / takers), largest)

    def room(self, *, ending: bool = False) -> int:
        """Return how many more ranges may be requested a second time: each takes bandwidth from the first requests."""
        with self._lock:
            if ending:
                return len(self._flying)
            seconds = sum(flight.is_hedge for flight in self._flying)
            return max(max((len(self._flying) - seconds) // _DOUBLED, 1) - seconds, 0)

    def late(self, *, ending: bool = False) -> list[InFlightRange]:
        """Return the ranges without a second request that should be complete by now, compared with the others.

        ``ending``: no range is left that has not been begun.

        A link that all ranges share slows them all at once, more so with every connection that is opened. So a range is
        compared with its present peers, and not only with earlier ranges.
        """
        now = time.monotonic()
        with self._lock:
            flying, rate, first_s = list(self._flying), self._bytes_per_s, self._first_s
            answered = (*self._answered, *(flight.began for flight in flying if flight.first_s is not None))
        # Where hardly any later request was answered, the link or the store is slow, and not a single answer.
        overtaken = math.inf if ending else min(nlargest(_OVERTAKERS, (*answered, *[-math.inf] * _OVERTAKERS)))
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
    """The (upper) median of sorted rates, the one at ``place`` left out."""
    count = len(rates) - (place is not None)
    if not count:
        return None
    middle = count // 2
    return rates[middle if place is None or middle < place else middle + 1][0]


def _averaged(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)


def _patience_s(flight: InFlightRange, rate: float, first_s: float | None, ending: bool) -> float:
    """Return how long a range may take. One whose answer has not even begun is known to be late much earlier."""
    whole_s = _SLACK * flight.size_bytes / rate + _SLACK_S
    if flight.first_s is not None or first_s is None:
        return whole_s
    if ending:
        return min(whole_s, _SLACK_LAST * first_s + _SLACK_LAST_S)
    return min(whole_s, _SLACK_FIRST * first_s + _SLACK_FIRST_S)
