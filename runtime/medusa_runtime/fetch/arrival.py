"""The bytes of one request on their way into the region.

Two requests may be under way for a range, and a chunk that readers have must not change any more: the slower answer may
be another one than that which was verified. So the second request keeps its bytes to itself until it has overtaken the
first one, and then goes on alone.
"""

from __future__ import annotations

from collections.abc import Callable

from ..region.writer import RegionWriter
from .in_flight import InFlightRange, OvertakenError, Span


class Arrival:
    """Writes what a request for ``span`` brings, from ``begun`` bytes behind its start, and has whole chunks published.

    ``publish(chunk, first, end)`` verifies and publishes the bytes [first, end) of the span. ``take_over()`` returns
    when nobody else writes to the span any more.
    """

    def __init__(
        self,
        writer: RegionWriter,
        span: Span,
        flight: InFlightRange,
        *,
        begun: int,
        publish: Callable[[int, int, int], None],
        take_over: Callable[[], None],
    ) -> None:
        self._writer = writer
        self._span = span
        self._flight = flight
        self._publish = publish
        self._take_over = take_over
        self._chunk_bytes = writer.chunks.chunk_bytes
        self.size_bytes = sum(map(writer.chunks.size, span.chunks))
        self.filled = begun
        self.published = 0

    @property
    def complete(self) -> bool:
        """Every chunk was published, here or by another request."""
        return self.published == self._span.length

    def write(self, data: memoryview) -> None:
        """Write the next bytes, where that is this request's to do. OvertakenError when another one goes on with it."""
        flight = self._flight
        if flight.late is not None and not flight.alone:
            if self.size_bytes - self.filled - len(data) >= flight.late.left_bytes:
                return  # the first request is farther
            self._take_over()
            flight.alone = True
        with flight.writing:
            if flight.overtaken:
                raise OvertakenError
            at = self.filled
            if flight.late is None:
                self._writer.write(self._span.first, at, data)
                return
            while data:  # a first request has published some of it
                number, inside = divmod(at, self._chunk_bytes)
                piece = data[: self._chunk_bytes - inside]
                if not self._writer.present(self._span.first + number):
                    self._writer.write(self._span.first, at, piece)
                data, at = data[len(piece) :], at + len(piece)

    def publish(self, *, prepare: bool) -> None:
        """Publish the chunks that are complete. ``prepare``: make the pages of the next one."""
        flight = self._flight
        if flight.late is not None and not flight.alone:
            return
        with flight.writing:
            if flight.overtaken:
                raise OvertakenError
            while not self.complete:
                first = self.published * self._chunk_bytes
                end = min(first + self._chunk_bytes, self.size_bytes)
                if self.filled < end:
                    return
                chunk = self._span.first + self.published
                if self._writer.present(chunk):
                    self._writer.count()
                else:
                    self._publish(chunk, first, end)
                self.published += 1
                if prepare and not self.complete:
                    self._writer.prepare(self._span.first + self.published)


__all__ = ["Arrival"]
