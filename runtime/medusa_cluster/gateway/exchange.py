"""One run of a request on one instance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import NamedTuple

import aiohttp

from .faults import error_code, error_message
from .health import Health, LostError
from .routes import Instance
from .streaming.sse import DONE, Event, Splitter

_CONNECT_S = 5.0
_END_S = 0.5
_LARGEST_ANSWER_BYTES = 256 << 20
_KEPT_HEADERS = ("Content-Type", "Retry-After", "Server-Timing", "X-Request-Id", "Allow", "Cache-Control")
_BUSY_CODES = ("not_ready", "overloaded")
_ENGINE_CODES = ("Engine.Failed", "Device.", "Limit.", "Cluster.")
# Codes that mean the instance has not begun the request and never will.
_ABSENT_CODES = ("Cluster.NoInstance", "Cluster.Unauthorized")


class BusyError(Exception):
    """An instance cannot take the request now, and has not begun it."""


class Answer(NamedTuple):
    """A whole answer, not streamed."""

    status: int
    headers: dict[str, str]
    body: bytes


class Exchange:
    """An instance's answer whose head has arrived. Made by the context manager ``exchange``."""

    def __init__(self, response: aiohttp.ClientResponse, instance: Instance, health: Health) -> None:
        self._response = response
        self._instance = instance
        self._health = health
        self._done = False

    @property
    def is_stream(self) -> bool:
        return self._response.content_type == "text/event-stream"

    def head(self) -> dict[str, str]:
        """Return the headers that the client should get."""
        return {name: self._response.headers[name] for name in _KEPT_HEADERS if name in self._response.headers}

    async def whole(self) -> Answer:
        """Read the whole answer. Raises LostError and BusyError."""
        pieces, size = [], 0
        async with self._health.watched(self._instance):
            with _breaking():
                async for piece in self._response.content.iter_any():
                    self._health.heard(self._instance.id)
                    pieces.append(piece)
                    size += len(piece)
                    if size > _LARGEST_ANSWER_BYTES:
                        raise LostError("its answer has no end", began=True)
        body = b"".join(pieces)
        status = self._response.status
        if status in (404, 429) or status >= 500:
            _judge(status, body)
        return Answer(status, self.head(), body)

    async def events(self) -> AsyncGenerator[Event]:
        """Yield the events of a stream, up to ``[DONE]``. Raises LostError if the stream ends before it."""
        splitter = Splitter()
        while True:
            async with self._health.watched(self._instance):
                with _breaking():
                    piece = await self._response.content.readany()
            if not piece:
                raise LostError("its stream ended early", began=True)
            self._health.heard(self._instance.id)
            try:
                events = splitter.feed(piece)
            except ValueError as error:
                raise LostError(f"it sent {error}", began=True) from None
            for event in events:
                if event.data is not None and event.data.startswith(b'{"error"'):
                    _judge_event(event.data)
                yield event
                if event.raw == DONE:
                    self._done = True
                    return

    async def close(self) -> None:
        """Give the connection back if the answer was read to its end. Else close it, so that the instance notices."""
        if self._done:
            with suppress(aiohttp.ClientError, OSError):  # TimeoutError is an OSError
                async with asyncio.timeout(_END_S):
                    await self._response.content.readany()  # the end of the body, which has nearly always arrived
        self._response.close()


@asynccontextmanager
async def exchange(
    session: aiohttp.ClientSession,
    instance: Instance,
    health: Health,
    *,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
) -> AsyncIterator[Exchange]:
    """Send a request to an instance, and wait for the head of its answer. Raises LostError."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    health.heard(instance.id)
    try:
        async with health.watched(instance):
            response = await session.post(
                instance.url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            )
    except aiohttp.ClientConnectorError as error:
        raise LostError(f"it cannot be reached ({error.os_error.strerror or error})", began=False) from None
    except TimeoutError:
        raise LostError("it cannot be reached in time", began=False) from None
    except (aiohttp.ClientError, OSError) as error:
        raise LostError(f"the connection broke ({error})", began=True) from None
    health.heard(instance.id)
    answer = Exchange(response, instance, health)
    try:
        yield answer
    finally:
        await answer.close()


@contextmanager
def _breaking() -> Iterator[None]:
    """Turn the errors of a broken connection into LostError."""
    try:
        yield
    except TimeoutError:
        raise
    except (aiohttp.ClientError, OSError) as error:
        raise LostError(f"the connection broke ({error or type(error).__name__})", began=True) from None


def _judge(status: int, body: bytes) -> None:
    """Raise LostError or BusyError for an error that another instance would probably not give."""
    code = error_code(body)
    if code in _ABSENT_CODES:
        raise LostError(f"its node server answers {_said(status, body)}", began=False)
    if status == 429 or (status == 503 and code in _BUSY_CODES):
        raise BusyError
    if status in (502, 503):  # its engine ended; a new engine does not know this request
        raise LostError(f"it failed ({_said(status, body)})", began=True)


def _said(status: int, body: bytes) -> str:
    parts = [part for part in (error_code(body), error_message(body)) if part]
    return ": ".join(parts) or str(status)


def _judge_event(data: bytes) -> None:
    code = error_code(data)
    if code in _BUSY_CODES or code.startswith(_ENGINE_CODES):
        raise LostError(f"it gave up ({code})", began=True)
