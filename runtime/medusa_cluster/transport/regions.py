"""The regions of a node, as its peers read them over HTTP. A peer's side is ``medusa_runtime/storage/peer.py``.

    GET /regions/<model URL, percent-encoded>/index?most=n        the weight index and small files, if not more
    GET /regions/<model URL>/shards/<name>?start=a&stop=b         the bytes [a, b) of a shard, in frames
    GET /regions/<model URL>/progress                             how much is there, at once

A range of chunks that are still on their way is answered as they arrive. So a chain of nodes is a row of prefetchers,
each of which reads from the node before it (BlitzScale §5.1). The bytes go from the region's pages to the socket
(sendfile), and are never copied here.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import IO, Protocol
from weakref import WeakValueDictionary

from aiohttp import web
from medusa_runtime.errors import MedusaError, NodeError
from medusa_runtime.node.regions.model_key import model_key
from medusa_runtime.region.checksummed import ChecksummedRegion
from medusa_runtime.region.layout import State
from medusa_runtime.storage.framing import (
    CHECKSUM_HEADER,
    CHUNK_BYTES_HEADER,
    READER_HEADER,
    Frame,
    entity_tag_of,
    framed_bytes,
    pack_index,
)

from .pacing import Pacer, connection_of, mark_weights

_LONGEST_RANGE_BYTES = 64 << 20
_MOST_RUN = 64  # chunks that are sent with one call
_ENCRYPTED_BYTES = 128 << 10
_MOST_REQUESTS = 64  # of one peer at a time
_LEAST_BYTES_PER_S = 64 << 10  # below which a peer that reads is given up
_PATIENCE_S = 10.0  # with a peer that takes nothing
_QUIET_S = 60.0  # with a region to which nothing comes
_LOOK_S = 0.5  # between looks whether a region still has a prefetcher
_TICK_S = 0.003
_APPEAR_S = 0.5  # for a region whose fetch is about to begin on this node


_Handler = Callable[[web.Request, ChecksummedRegion], Awaitable[web.StreamResponse]]


class RegionSource(Protocol):
    """Where a node server finds the regions of its node: ``agent_regions.AgentRegions``."""

    async def acquire(self, url: str, *, current: bool, within_s: float) -> ChecksummedRegion | None:
        """Return this node's region of a model, which is laid out. Give it back with ``release``.

        None when the node has none within ``within_s`` and fetches none. ``current``: not one that has been replaced
        since it was last asked for.
        """

    def release(self, region: ChecksummedRegion) -> None: ...


class _Arrivals:
    """Wakes those who wait for chunks. One timer looks for all of them, and none runs while nobody waits.

    The prefetcher is another process, which only stores to shared memory. A look takes microseconds.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], tuple[ChecksummedRegion, int, float]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, region: ChecksummedRegion, chunk: int) -> None:
        """Return when a chunk is there, and after a while in any case."""
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        self._waiting[arrived] = region, chunk, loop.time() + _LOOK_S
        if self._timer is None:
            self._timer = loop.call_later(_TICK_S, self._look)
        try:
            await arrived
        finally:
            del self._waiting[arrived]

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for arrived, (region, chunk, until) in self._waiting.items():
            if (region.has(chunk) or now >= until) and not arrived.done():
                arrived.set_result(None)
        self._timer = loop.call_later(_TICK_S, self._look) if self._waiting else None


class _Refused(Exception):
    """An answer other than the one that was asked for."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class RegionRoutes:
    """Answers peers. ``sent_bytes``: of weights, since the start."""

    def __init__(self, source: RegionSource, pacer: Pacer) -> None:
        self._source = source
        self._pacer = pacer
        self._arrivals = _Arrivals()
        self._requests: Counter[str] = Counter()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.sent_bytes = 0

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/regions/{url}/index", self._answer(self._index)),
            web.get("/regions/{url}/shards/{name}", self._answer(self._shard)),
            web.get("/regions/{url}/progress", self._answer(self._progress)),
        ]

    def _answer(self, handler: _Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Wrap a handler: within the limits, with the region that the path names."""

        async def answer(request: web.Request) -> web.StreamResponse:
            peer = request.remote or ""
            if self._requests[peer] >= _MOST_REQUESTS:
                return web.Response(status=503, headers={"Retry-After": "1"}, text="too many requests at a time\n")
            self._requests[peer] += 1
            try:
                return await self._with_region(request, handler)
            except _Refused as refused:
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
            except _Refused as refused:
                if refused.status != 412 or current:
                    raise
                current = True  # the model may have been fetched anew
            finally:
                self._source.release(region)

    async def _index(self, request: web.Request, region: ChecksummedRegion) -> web.StreamResponse:
        headers = {CHECKSUM_HEADER: f"{region.index_checksum:016x}", CHUNK_BYTES_HEADER: str(region.chunk_bytes)}
        body = pack_index(region.index.to_json(), region.files())
        if "most" in request.query and len(body) > _number(request.query["most"]):
            return web.Response(status=204)
        return web.Response(body=body, headers=headers, content_type="application/octet-stream")

    async def _progress(self, request: web.Request, region: ChecksummedRegion) -> web.StreamResponse:
        return web.json_response(
            {
                "state": region.state.name.lower(),
                "fetched_bytes": region.fetched_bytes,
                "total_bytes": region.total_bytes,
                "chunk_bytes": region.chunk_bytes,
            }
        )

    async def _shard(self, request: web.Request, region: ChecksummedRegion) -> web.StreamResponse:
        first, count = _range(request, region)
        size = sum(region.chunks.size(chunk) for chunk in range(first, first + count))
        response = web.StreamResponse(headers={"ETag": _etag(request, region)})
        response.content_type = "application/octet-stream"
        response.content_length = framed_bytes(count, size)
        await response.prepare(request)
        connection = connection_of(request.transport)
        if connection is not None:
            mark_weights(connection)
        # A fetch asks for the next range before it has the one before. Sent at a time, both would come half as fast,
        # and each node of a chain would be two chunks behind the one before it instead of one.
        turn = self._turns.setdefault(request.headers.get(READER_HEADER, str(id(request))), asyncio.Lock())
        try:
            sent = 0
            while sent < count:
                ready = await self._wait(request, region, first + sent, min(count - sent, _MOST_RUN))
                async with turn:
                    await self._send(request, response, region, first + sent, ready)
                sent += ready
        except (MedusaError, OSError):  # the head is sent: only the connection's end can show it
            _abort(request)
        except BaseException:
            _abort(request)
            raise
        else:
            await response.write_eof()
        return response

    async def _wait(self, request: web.Request, region: ChecksummedRegion, first: int, most: int) -> int:
        """Wait until a chunk is there, and return how many are, one behind the other."""
        if ready := region.present(first, most):
            return ready
        changed = time.monotonic()
        fetched_bytes = region.fetched_bytes
        while not (ready := region.present(first, most)):
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError("the peer has gone")
            await self._arrivals.wait(region, first)
            if region.has(first):
                continue
            # In a chain, chunks come in the order in which they are asked for; from others, this one may be far away.
            region.demand(first)
            now = time.monotonic()
            if region.fetched_bytes != fetched_bytes:
                fetched_bytes, changed = region.fetched_bytes, now
            if now - changed > _QUIET_S or not region.is_filled:
                raise NodeError("the region is not being filled")
        return ready

    async def _send(
        self, request: web.Request, response: web.StreamResponse, region: ChecksummedRegion, first: int, count: int
    ) -> None:
        """Send neighbouring chunks that are there: their frames, and then their bytes in one piece."""
        sizes = [region.chunks.size(chunk) for chunk in range(first, first + count)]
        frames = [
            Frame(size, count - 1 - number, region.checksum(first + number)).pack() for number, size in enumerate(sizes)
        ]
        size, offset = sum(sizes), region.offset(first)
        transport, connection = request.transport, connection_of(request.transport)
        if connection is None or not isinstance(transport, asyncio.WriteTransport) or transport.is_closing():
            raise ConnectionResetError("the peer has gone")
        loop = asyncio.get_running_loop()
        patience_s = _PATIENCE_S + size / min(_LEAST_BYTES_PER_S, self._pacer.bytes_per_s or _LEAST_BYTES_PER_S)
        giving_up = loop.call_later(patience_s, transport.abort)  # a task, as for a timeout, would cost more
        try:
            with self._pacer.sending(connection):
                if transport.get_extra_info("sslcontext") is not None:
                    await response.write(b"".join(frames))
                    await _send_encrypted(response, region.file.fileno(), offset, size)
                else:
                    # The frames leave together with the first bytes, and wake the reader once.
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
                    transport.write(b"".join(frames))
                    sent = _send_at_once(transport, connection, region.file, offset, size)
                    if sent < size:
                        await loop.sendfile(transport, region.file, offset + sent, size - sent, fallback=False)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
        finally:
            giving_up.cancel()
        self.sent_bytes += size


def routes(source: RegionSource, pacer: Pacer) -> list[web.RouteDef]:
    """Return the routes with which a node server offers its node's regions to peers."""
    return RegionRoutes(source, pacer).routes()


def _key(request: web.Request) -> str:
    try:
        return model_key(request.match_info["url"])
    except NodeError as error:
        raise _Refused(400, str(error)) from None


def _etag(request: web.Request, region: ChecksummedRegion) -> str:
    found = region.shard(request.match_info["name"])
    if found is None:
        raise _Refused(404, "the model has no such shard")
    etag = entity_tag_of(found[1].version)
    if request.headers.get("If-Match", etag) != etag:
        raise _Refused(412, "this node has another version of the shard")
    return etag


def _range(request: web.Request, region: ChecksummedRegion) -> tuple[int, int]:
    """Return the chunks that a request covers: the first, and their number."""
    found = region.shard(request.match_info["name"])
    if found is None:
        raise _Refused(404, "the model has no such shard")
    _etag(request, region)
    number, shard = found
    start, stop = (_number(request.query.get(name)) - shard.data_start for name in ("start", "stop"))
    if not 0 <= start < stop <= shard.data_bytes or stop - start > _LONGEST_RANGE_BYTES:
        raise _Refused(416, f"expected at most {_LONGEST_RANGE_BYTES} bytes within the shard's data")
    if start % region.chunk_bytes or (stop % region.chunk_bytes and stop != shard.data_bytes):
        raise _Refused(416, f"expected whole chunks of {region.chunk_bytes} bytes")
    covered = region.chunks.covering(number, start, stop)
    if region.state == State.FAILED:
        raise _Refused(404, "the fetch of this model has failed")
    return covered.start, len(covered)


def _send_at_once(
    transport: asyncio.WriteTransport, connection: socket.socket, file: IO[bytes], offset: int, size: int
) -> int:
    """Send what the connection takes at once, and return how much that is: most of a chunk, as a rule."""
    sent = 0
    with suppress(BlockingIOError):
        while sent < size and not transport.get_write_buffer_size():
            count = os.sendfile(connection.fileno(), file.fileno(), offset + sent, size - sent)
            if not count:
                raise ConnectionResetError("the region has ended early")
            sent += count
    return sent


async def _send_encrypted(response: web.StreamResponse, fd: int, offset: int, size: int) -> None:
    """Send a part of a file through TLS: the kernel cannot, and `loop.sendfile` would move the file's position."""
    stop = offset + size
    while offset < stop:
        piece = os.pread(fd, min(_ENCRYPTED_BYTES, stop - offset), offset)
        if not piece:
            raise ConnectionResetError("the region has ended early")
        await response.write(piece)
        offset += len(piece)


def _number(text: str | None) -> int:
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise _Refused(400, "expected whole numbers")
    return int(text)


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


__all__ = ["RegionRoutes", "RegionSource", "routes"]
