"""Write the bytes of one request into the region.

Two requests may be under way for the same range: a first one and a hedge. A published chunk must not change any more,
and the slower answer may differ from the one that was verified. So the hedge writes nothing into the region until it
has overtaken the first request. Then it continues alone.
"""

from __future__ import annotations

from collections.abc import Callable

from ..region.writer import RegionWriter
from .in_flight import InFlightRange, OvertakenError, Span


class RangeWriter:
    """Writes the bytes of a request for ``span``, and publishes whole chunks.

    The request starts ``begun`` bytes behind the start of the span. ``publish(chunk, first, end)`` verifies and
    publishes a chunk, the bytes [first, end) of the span. ``take_over()`` returns when no other request writes to the
    span any more.
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
        """Whether every chunk has been published, here or by another request."""
        return self.published == self._span.length

    def write(self, data: memoryview) -> None:
        """Write the next bytes, unless the first request is ahead. OvertakenError if another request has taken over."""
        flight = self._flight
        if flight.first_request is not None and not flight.took_over:
            if self.size_bytes - self.filled - len(data) >= flight.first_request.left_bytes:
                return  # the first request is ahead
            self._take_over()
            flight.took_over = True
        with flight.writing:
            if flight.overtaken:
                raise OvertakenError
            at = self.filled
            if flight.first_request is None:
                self._writer.write(self._span.first, at, data)
                return
            while data:  # chunk by chunk, since the first request has published some of them
                number, inside = divmod(at, self._chunk_bytes)
                piece = data[: self._chunk_bytes - inside]
                if not self._writer.present(self._span.first + number):
                    self._writer.write(self._span.first, at, piece)
                data, at = data[len(piece) :], at + len(piece)

    def publish(self, *, prepare: bool) -> None:
        """Publish the chunks that are complete. With ``prepare``, also allocate the pages of the next one."""
        flight = self._flight
        if flight.first_request is not None and not flight.took_over:
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
                    self._writer.raise_watermark()
                else:
                    self._publish(chunk, first, end)
                self.published += 1
                if prepare and not self.complete:
                    self._writer.prepare(self._span.first + self.published)


__all__ = ["RangeWriter"]
