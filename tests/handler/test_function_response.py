"""How a function's result becomes a response: what a served function cannot show."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from medusa_handler.contract import Headers, Request, Response
from medusa_handler.http.function_response import respond


class Pieces:
    """A stream that somebody has to close, such as another server's answer."""

    closed = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        return b"piece"

    def close(self) -> None:
        self.closed = True


def test_a_stream_that_is_not_read_to_its_end_is_closed() -> None:
    service: Any = SimpleNamespace(function=None)
    request = Request("POST", "/", Headers([]), {}, b"", "id")
    for read in (0, 1):
        pieces = Pieces()
        response = respond(service, Response(pieces), request, lambda: False)
        for _ in range(read):
            assert next(iter(response.response)) == b"piece"
        response.close()
        assert pieces.closed
