"""Server-sent events (WHATWG HTML, section 9.2), parsed from a stream of bytes."""

from __future__ import annotations

from typing import NamedTuple

from ..faults import compact, too_large

DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": waiting\n\n"
_LARGEST_BYTES = 128 << 20  # a million log-probabilities, which a response has at its end, take 80 MB


class Event(NamedTuple):
    """An event: its raw bytes, and its data, which is None for a comment."""

    raw: bytes
    data: bytes | None


class Splitter:
    """A parser that splits a stream into events."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0

    @property
    def held_bytes(self) -> int:
        """The size of the event that has begun and is not complete."""
        return len(self._buffer)

    def feed(self, piece: bytes) -> list[Event]:
        """Return the events that ``piece`` has completed. Raises Fault if an event is too large."""
        self._buffer += piece
        events = []
        while (end := self._buffer.find(b"\n\n", max(0, self._searched - 1))) >= 0:
            with memoryview(self._buffer) as view:
                raw = bytes(view[: end + 2])  # one copy; a slice of the buffer would be another
            del self._buffer[: end + 2]
            self._searched = 0
            events.append(Event(raw, _data(raw)))
        self._searched = len(self._buffer)
        if self._searched > _LARGEST_BYTES:
            raise too_large("an event of a stream", _LARGEST_BYTES)
        return events


def event(value: object) -> bytes:
    """Return an event with this value as JSON."""
    return b"data: " + compact(value) + b"\n\n"


def _data(raw: bytes) -> bytes | None:
    lines = [line[5:].removeprefix(b" ") for line in raw.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
