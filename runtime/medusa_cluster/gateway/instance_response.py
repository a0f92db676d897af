"""One run of a request on one instance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import NamedTuple

import aiohttp

from .answer_memory import Share
from .faults import LARGEST_ERROR_BYTES, answers_too_large, error_code, error_message, too_large
from .health import Health, InstanceLostError
from .large_json import LARGE_BYTES, parse, run_beside
from .routes import Instance
from .streaming.sse import DONE, Event, Splitter

_CONNECT_S = 5.0
_END_S = 0.5
_LARGEST_ANSWER_BYTES = 256 << 20
_COPIES = 4  # of a large event of a stream, while it is split off and compared
SMALL_BYTES = 64 << 10  # an answer of this size never waits for its client
_KEPT_HEADERS = ("Content-Type", "Retry-After", "Server-Timing", "X-Request-Id", "Allow", "Cache-Control")
REVISION = "Medusa-Revision"
_BUSY_CODES = ("not_ready", "overloaded")
# A stream of chunks ends with [DONE], one of the Responses API or of Anthropic's Messages API with one of these.
_FAILED = b"event: response.failed\n"
_ERROR = b"event: error\n"
_LAST = (b"event: response.completed\n", b"event: response.incomplete\n", _FAILED, b"event: message_stop\n", _ERROR)
# Its answers, or the bodies of requests, take all the memory they may. That is no fault of the instance's.
_MEMORY_CODES = ("answer_memory", "body_memory")
_ENGINE_CODES = ("Engine.Failed", "Device.", "Limit.", "Cluster.")
# Codes that mean the instance has not begun the request and never will.
_ABSENT_CODES = ("Cluster.NoInstance", "Cluster.Unauthorized")


class BusyError(Exception):
    """An instance cannot take the request now, and has not begun it."""


class Answer(NamedTuple):
    """A whole answer, not streamed."""

    status: int
    headers: dict[str, str]
    body: bytes | bytearray


class InstanceResponse:
    """An instance's answer whose head has arrived. Made by the context manager ``request_instance``."""

    def __init__(self, response: aiohttp.ClientResponse, instance: Instance, health: Health) -> None:
        self._response = response
        self._instance = instance
        self._health = health
        self._held = bytearray()
        self._done = False

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def size_bytes(self) -> int | None:
        """The size of an answer that is no stream, or None if its head does not say."""
        return self._response.content_length

    @property
    def is_stream(self) -> bool:
        return self._response.content_type == "text/event-stream"

    def head(self) -> dict[str, str]:
        """Return the headers that the client should get."""
        kept = {name: self._response.headers[name] for name in _KEPT_HEADERS if name in self._response.headers}
        return kept | ({REVISION: self._instance.revision} if self._instance.revision else {})

    async def whole(self, share: Share) -> Answer | None:
        """Read the whole answer. Return None if there is not enough memory for it; ``rest`` then yields it.

        Raises InstanceLostError, BusyError, and Fault if it is too large.
        """
        if (self.size_bytes or 0) > _LARGEST_ANSWER_BYTES:
            raise too_large("an answer", _LARGEST_ANSWER_BYTES)
        may_be_unusable = self.status in (404, 429) or self.status >= 500
        async with self._health.watch(self._instance):
            with _as_instance_lost():
                async for piece in self._response.content.iter_any():
                    self._health.note_bytes(self._instance.id)
                    self._held += piece
                    size = len(self._held)
                    if size > _LARGEST_ANSWER_BYTES:
                        raise too_large("an answer", _LARGEST_ANSWER_BYTES)
                    has_room = size <= SMALL_BYTES or share.resize(size)
                    if may_be_unusable and size <= LARGEST_ERROR_BYTES:
                        continue
                    if may_be_unusable:
                        _raise_if_unusable(self.status, self._held)
                        may_be_unusable = False
                    if not has_room:
                        return None
        if may_be_unusable:
            _raise_if_unusable(self.status, self._held)
        return Answer(self.status, self.head(), self._held)

    async def rest(self, share: Share) -> AsyncGenerator[bytes]:
        """Yield an answer that ``whole`` has not read to its end, in pieces. Raises InstanceLostError."""
        held, self._held = self._held, bytearray()
        for start in range(0, len(held), SMALL_BYTES):
            yield bytes(memoryview(held)[start : start + SMALL_BYTES])
        del held
        share.release()
        while True:
            async with self._health.watch(self._instance):
                with _as_instance_lost():
                    piece = await self._response.content.readany()
            if not piece:
                return
            self._health.note_bytes(self._instance.id)
            yield piece

    async def events(self, share: Share) -> AsyncGenerator[Event]:
        """Yield the events of a stream, up to the last one.

        Raises InstanceLostError if the stream ends before it, and Fault if an event is too large, or too large for the
        memory that is left.
        """
        splitter = Splitter()
        while True:
            async with self._health.watch(self._instance):
                with _as_instance_lost():
                    piece = await self._response.content.readany()
            if not piece:
                raise InstanceLostError("its stream ended early", began=True)
            self._health.note_bytes(self._instance.id)
            size = splitter.held_bytes + len(piece)
            if _COPIES * size > share.total_bytes > 0 and size > LARGE_BYTES:  # it would not fit alone either
                raise too_large("an event of a stream (a share of --answer-memory-mb)", share.total_bytes // _COPIES)
            if not share.resize(_COPIES * size if size > LARGE_BYTES else 0):
                raise answers_too_large(share.total_bytes)
            for event in splitter.feed(piece):
                if event.data is not None and (event.data.startswith(b'{"error"') or event.raw.startswith(_ERROR)):
                    _raise_if_given_up(error_code(event.data))
                elif event.data is not None and event.raw.startswith(_FAILED):
                    _raise_if_given_up(await run_beside(len(event.data), _code_of_failure, event.data))
                yield event
                if event.raw == DONE or event.raw.startswith(_LAST):
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
async def request_instance(
    session: aiohttp.ClientSession,
    instance: Instance,
    health: Health,
    *,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
) -> AsyncIterator[InstanceResponse]:
    """Send a request to an instance, and wait for the head of its answer. Raises InstanceLostError."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    health.note_bytes(instance.id)
    try:
        async with health.watch(instance):
            response = await session.post(
                instance.url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            )
    except aiohttp.ClientConnectorError as error:
        raise InstanceLostError(f"it cannot be reached ({error.os_error.strerror or error})", began=False) from None
    except TimeoutError:
        raise InstanceLostError("it cannot be reached in time", began=False) from None
    except (aiohttp.ClientError, OSError) as error:
        raise InstanceLostError(f"the connection broke ({error})", began=True) from None
    health.note_bytes(instance.id)
    answer = InstanceResponse(response, instance, health)
    try:
        yield answer
    finally:
        await answer.close()


@contextmanager
def _as_instance_lost() -> Iterator[None]:
    """Turn the errors of a broken connection into InstanceLostError."""
    try:
        yield
    except TimeoutError:
        raise
    except (aiohttp.ClientError, OSError) as error:
        raise InstanceLostError(f"the connection broke ({error or type(error).__name__})", began=True) from None


def _raise_if_unusable(status: int, body: bytes | bytearray) -> None:
    """Raise InstanceLostError or BusyError for an error that another instance would probably not give."""
    code = error_code(body)
    if code in _ABSENT_CODES:
        raise InstanceLostError(f"its node server answers {_describe_error(status, body)}", began=False)
    if status == 429 or (status == 503 and code in _BUSY_CODES):
        raise BusyError
    if status in (502, 503) and code not in _MEMORY_CODES:  # its engine ended; a new engine does not know this request
        raise InstanceLostError(f"it failed ({_describe_error(status, body)})", began=True)


def _describe_error(status: int, body: bytes | bytearray) -> str:
    parts = [part for part in (error_code(body), error_message(body)) if part]
    return ": ".join(parts) or str(status)


def _code_of_failure(data: bytes) -> str:
    """Return the stable code in a failed response, or an empty text. OpenAI's own code is less exact."""
    try:
        return str(parse(data)["response"]["error"]["type"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""


def _raise_if_given_up(code: str) -> None:
    if code in _BUSY_CODES or code.startswith(_ENGINE_CODES):
        raise InstanceLostError(f"it gave up ({code})", began=True)
