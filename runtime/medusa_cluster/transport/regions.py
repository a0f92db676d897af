"""The HTTP routes by which peers read a node's regions. The reader's side is ``medusa_runtime/storage/peer.py``.

    GET /regions/<model URL, percent-encoded>/index?most=n        the weight index and small files, unless above n bytes
    GET /regions/<model URL>/shards/<name>?start=a&stop=b         the bytes [a, b) of a shard, in frames
    GET /regions/<model URL>/progress                             how much has been fetched, at once

Chunks that have not arrived yet are sent as they arrive. So a chain of nodes is a row of prefetchers, each of which
reads from the node before it (BlitzScale §5.1).
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from aiohttp import web
from medusa_runtime.errors import MedusaError, NodeError
from medusa_runtime.node.regions.model_key import model_key
from medusa_runtime.region.checksummed import ChecksummedRegion
from medusa_runtime.region.layout import State
from medusa_runtime.storage.framing import (
    CHECKSUM_HEADER,
    CHUNK_BYTES_HEADER,
    READER_HEADER,
    entity_tag_of,
    framed_bytes,
)

from .pacing import Pacer, connection_of, mark_weights
from .sending import EncryptedWriter, PlainWriter, RangeSender, ReaderQueues

_LONGEST_RANGE_BYTES = 64 << 20
_MOST_REQUESTS = 64  # at a time, from one address
_MOST_THREADS = 256
_TICK_S = 0.003
_APPEAR_S = 0.5  # how long to wait for a region: its fetch may be about to begin on this node


_Handler = Callable[[web.Request, ChecksummedRegion], Awaitable[web.StreamResponse]]


class RegionSource(Protocol):
    """The place where a node server gets its node's regions, such as ``agent_regions.AgentRegions``."""

    async def acquire(self, url: str, *, current: bool, within_s: float) -> ChecksummedRegion | None:
        """Return this node's region of a model, laid out. Give it back with ``release``.

        Returns None if the node neither has nor fetches the model within ``within_s``. ``current`` asks the agent
        again, so that a region which has been replaced since the last request is not returned.
        """

    def release(self, region: ChecksummedRegion) -> None: ...


class _HttpError(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class RegionRoutes:
    """Handlers that answer peers. ``sent_bytes`` counts the bytes of weights sent since the start."""

    def __init__(self, source: RegionSource, pacer: Pacer) -> None:
        self._source = source
        self._pacer = pacer
        self._requests: Counter[str] = Counter()
        self._queues = ReaderQueues()
        self._threads = ThreadPoolExecutor(_MOST_THREADS, "weights")
        self._counting = threading.Lock()
        self.sent_bytes = 0

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/regions/{url}/index", self._answer(self._index)),
            web.get("/regions/{url}/shards/{name}", self._answer(self._shard)),
            web.get("/regions/{url}/progress", self._answer(self._progress)),
        ]

    def _answer(self, handler: _Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Wrap a handler: keep the limit of requests, and pass it the region that the path names."""

        async def answer(request: web.Request) -> web.StreamResponse:
            peer = request.remote or ""
            if self._requests[peer] >= _MOST_REQUESTS:
                return web.Response(status=503, headers={"Retry-After": "1"}, text="too many requests at a time\n")
            self._requests[peer] += 1
            try:
                return await self._with_region(request, handler)
            except _HttpError as refused:
                return web.Response(status=refused.status, text=f"{refused}\n")
            except MedusaError as error:
                return web.Response(status=404, text=f"{error}\n")
            finally:
                self._requests[peer] -= 1
                if not self._requests[peer]:
                    del self._requests[peer]

        return answer

    async def _with_region(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        key, current = _key(request), request.path.endswith("/index")
        while True:
            region = await self._source.acquire(key, current=current, within_s=_APPEAR_S)
            if region is None:
                return web.Response(status=404, text="this node has no region of the model\n")
            try:
                return await handler(request, region)
            except _HttpError as refused:
                if refused.status != 412 or current:
                    raise
                current = True  # the model may have been fetched anew
            finally:
                self._source.release(region)

    async def _index(self, request: web.Request, region: ChecksummedRegion) -> web.StreamResponse:
        headers = {CHECKSUM_HEADER: f"{region.index_checksum:016x}", CHUNK_BYTES_HEADER: str(region.chunk_bytes)}
        body = region.packed_index
        if "most" in request.query and len(body) > _number(request.query["most"]):
            return web.Response(status=204)
        return web.Response(body=body, headers=headers, content_type="application/octet-stream")

    async def _progress(self, request: web.Request, region: ChecksummedRegion) -> web.StreamResponse:
        return web.json_response(
            {
                "state": region.state.name.lower(),
                "fetched_bytes": region.fetched_bytes,
                "received_bytes": region.received_bytes,
                "total_bytes": region.total_bytes,
                "chunk_bytes": region.chunk_bytes,
            }
        )

    async def _shard(self, request: web.Request, region: ChecksummedRegion) -> web.StreamResponse:
        chunks = _range(request, region)
        response = web.StreamResponse(headers={"ETag": _etag(request, region)})
        response.content_type = "application/octet-stream"
        response.content_length = framed_bytes(len(chunks), sum(map(region.chunks.size, chunks)))
        await response.prepare(request)
        try:
            await self._send(request, response, region, chunks)
        except (MedusaError, OSError):  # the head is sent, so only closing the connection can report the error
            _abort(request)
        except BaseException:
            _abort(request)
            raise
        else:
            await response.write_eof()
        return response

    async def _send(
        self, request: web.Request, response: web.StreamResponse, region: ChecksummedRegion, chunks: range
    ) -> None:
        """Send chunks in a thread. Returns only after the thread has ended, even if this task is cancelled."""
        loop, transport = asyncio.get_running_loop(), request.transport
        connection = connection_of(transport)
        if connection is None or not isinstance(transport, asyncio.WriteTransport):
            raise ConnectionResetError("the peer has gone")
        mark_weights(connection)
        while transport.get_write_buffer_size() and not transport.is_closing():  # the head goes first
            await asyncio.sleep(_TICK_S)

        def write(data: bytearray, within_s: float) -> None:
            asyncio.run_coroutine_threadsafe(response.write(data), loop).result(within_s)

        encrypted = transport.get_extra_info("sslcontext") is not None
        writer = EncryptedWriter(connection, write) if encrypted else PlainWriter(connection)
        sender = RangeSender(
            region,
            chunks,
            writer,
            queue=self._queues.of(request.headers.get(READER_HEADER, str(id(request)))),
            pacer=self._pacer,
            gone=transport.is_closing,
            sent=self._count,
        )
        running = loop.run_in_executor(self._threads, sender.run)
        try:
            await asyncio.shield(running)
        finally:
            sender.stop()
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            writer.close()

    def _count(self, size_bytes: int) -> None:
        with self._counting:
            self.sent_bytes += size_bytes


def _key(request: web.Request) -> str:
    try:
        return model_key(request.match_info["url"])
    except NodeError as error:
        raise _HttpError(400, str(error)) from None


def _etag(request: web.Request, region: ChecksummedRegion) -> str:
    found = region.shard(request.match_info["name"])
    if found is None:
        raise _HttpError(404, "the model has no such shard")
    etag = entity_tag_of(found[1].version)
    if request.headers.get("If-Match", etag) != etag:
        raise _HttpError(412, "this node has another version of the shard")
    return etag


def _range(request: web.Request, region: ChecksummedRegion) -> range:
    """Return the chunks that a request asks for. Refuses a range that is too long or does not fit whole chunks."""
    found = region.shard(request.match_info["name"])
    if found is None:
        raise _HttpError(404, "the model has no such shard")
    _etag(request, region)
    number, shard = found
    start, stop = (_number(request.query.get(name)) - shard.data_start for name in ("start", "stop"))
    if not 0 <= start < stop <= shard.data_bytes or stop - start > _LONGEST_RANGE_BYTES:
        raise _HttpError(416, f"expected at most {_LONGEST_RANGE_BYTES} bytes within the shard's data")
    if start % region.chunk_bytes or (stop % region.chunk_bytes and stop != shard.data_bytes):
        raise _HttpError(416, f"expected whole chunks of {region.chunk_bytes} bytes")
    if region.state == State.FAILED:
        raise _HttpError(404, "the fetch of this model has failed")
    return region.chunks.covering(number, start, stop)


def _number(text: str | None) -> int:
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise _HttpError(400, "expected whole numbers")
    return int(text)


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


__all__ = ["RegionRoutes", "RegionSource"]
