"""Reads, piece by piece, an answer of the HTTP server that an engine such as vLLM's has of its own.

``http.client`` is not used, because importing it takes 20 ms of CPU (it brings email and TLS), on the cores on which
the engine computes the first answer. The engine may be another user's process, so the sizes of heads and lines are
limited.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

from ..storage.http.fields import FieldError, Head, chunk_size, framing, parse_lines

_HEAD_BYTES = 64 << 10
_LINE_BYTES = 256  # limit for the line before a chunk, which holds the chunk's size
_PIECE_BYTES = 64 << 10
_MOST_INTERIM = 8  # interim answers (1xx) before the final one


class HttpResponse:
    """An HTTP answer over ``connection``, which stays the caller's to close. Call ``begin`` first, to read the head.

    Methods raise FieldError for bytes that are not HTTP and for an answer that ends early, and OSError when the
    connection breaks.
    """

    def __init__(self, connection: socket.socket, method: str) -> None:
        self._connection = connection
        self._method = method
        self._buffer = b""  # received, but not consumed yet
        self._length: int | None = 0
        self._chunked = False
        self.status = 0
        self.headers: list[tuple[str, str]] = []

    def begin(self) -> None:
        """Receive the head, and set ``status`` and ``headers`` (in their order, names in lower case)."""
        for _ in range(_MOST_INTERIM):
            minor, status, lines = parse_lines(self._read_until(b"\r\n\r\n", _HEAD_BYTES))
            if status >= 200:
                head = Head(minor, status, dict(lines))
                if sum(name in ("content-length", "transfer-encoding") for name, _ in lines) > 1:
                    raise FieldError("expected one length of the answer, found more")
                self._length, self._chunked = (0, False) if self._method == "HEAD" else framing(head)
                self.status, self.headers = status, lines
                return
        raise FieldError(f"expected an answer, found {_MOST_INTERIM} that announce one (1xx)")

    def pieces(self) -> Iterator[bytes]:
        """Yield the body in pieces, as they arrive."""
        if self._chunked:
            while size := chunk_size(self._read_until(b"\r\n", _LINE_BYTES)):
                yield from self._read_exactly(size)
                if self._read_until(b"\r\n", _LINE_BYTES):
                    raise FieldError("expected a line's end behind a chunk")
        elif self._length is not None:
            yield from self._read_exactly(self._length)
        else:
            while data := self._receive():
                yield data

    def _read_exactly(self, size: int) -> Iterator[bytes]:
        while size:
            data = self._receive()
            if not data:
                raise FieldError("the connection was closed before the answer's end")
            data, self._buffer = data[:size], data[size:]
            size -= len(data)
            yield data

    def _receive(self) -> bytes:
        if not self._buffer:
            return self._connection.recv(_PIECE_BYTES)
        data, self._buffer = self._buffer, b""
        return data

    def _read_until(self, end: bytes, most: int) -> bytes:
        """Receive up to and including ``end``, at most ``most`` bytes before it, and return what precedes it."""
        searched = 0
        while (at := self._buffer.find(end, max(searched - len(end), 0))) < 0 and len(self._buffer) <= most:
            searched = len(self._buffer)
            data = self._connection.recv(_PIECE_BYTES)
            if not data:
                raise FieldError("the connection was closed before the answer's end")
            self._buffer += data
        if not 0 <= at <= most:
            raise FieldError(f"expected a head or line of at most {most} bytes, found more")
        found, self._buffer = self._buffer[:at], self._buffer[at + len(end) :]
        return found


__all__ = ["FieldError", "HttpResponse"]
