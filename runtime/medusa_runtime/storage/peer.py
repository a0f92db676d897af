"""Another node of the cluster as a store: its region of a checkpoint, whole or still on its way.

Each chunk comes with the checksum that the node made which fetched it from the object store, and is verified before
the caller learns of it. The checksums find damage on the way and in a node's memory. They do not protect from a node
that holds the cluster's token and lies.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from ..errors import (
    ConfigError,
    ForbiddenError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
    UnreachableError,
    WrongBytesError,
)
from .base import redacted
from .compiled_chunks import ENDED, SILENT, WRONG, Landing, compiled
from .framing import (
    CHECKSUM_HEADER,
    CHUNK_BYTES_HEADER,
    FRAME_BYTES,
    PEER_CHUNK_BYTES,
    READER_HEADER,
    Frame,
    FramingError,
    checksum_function,
    checksum_of_index,
    entity_tag_of,
    parse_index,
)
from .http.pool import ConnectionPool
from .http.store import Target, parse_target
from .http.wire import Connection, Response, StalledError, WireError
from .peer_access import PeerAccess

if TYPE_CHECKING:
    import ssl

_LONGEST_INDEX_BYTES = 512 << 20
_ERROR_BODY_BYTES = 4 << 10
_ANSWER_S = 3.0  # for a connection, and for an answer to begin
_SILENCE_S = 1.0  # after which a peer is asked whether it lives
_PROBE_S = 2.0  # for its answer
_STANDSTILL_S = 4.0  # how long a peer that lives may get nothing itself
_UNANSWERED_S = 2.0  # for what a request says to be acknowledged
_LEAST_BYTES_PER_S = 1024.0
_TOGETHER_BYTES = 8 << 20  # what compiled code receives before the caller learns of it; a chunk at least


class Offer(NamedTuple):
    """What a peer has of a checkpoint: its index, as text, its small files, and how its region is cut into chunks."""

    node_url: str
    index_text: bytes
    files: dict[str, bytes]
    chunk_bytes: int


class Chunk(NamedTuple):
    """A verified chunk in the caller's buffer. ``filled``: the buffer's bytes up to its end.

    ``checksum``: None when readers have it already, and perhaps several before it, which are of ``size`` together.
    """

    size: int
    filled: int
    checksum: int | None


class Progress(NamedTuple):
    """How far a peer is: the state of its region, the bytes that it can send, and those that it has received.

    Those of unfinished chunks are among ``received_bytes``.
    """

    state: str
    fetched_bytes: int
    received_bytes: int


class _Patience:
    """How long to wait for a peer that sends nothing: for as long as it lives, and gets something itself."""

    def __init__(self, store: PeerStore) -> None:
        self._store = store
        self.heard()

    def heard(self) -> None:
        """Note that bytes have come."""
        self._bytes, self._at = -1, time.monotonic()

    def ask(self) -> None:
        """Ask for the peer's progress, after a silence. StorageError when it is no use to wait on."""
        state, _, received_bytes = self._store.progress()
        now = time.monotonic()
        if received_bytes != self._bytes and self._bytes >= 0:
            self._at = now
        self._bytes = received_bytes
        if state == "failed" or now - self._at > _STANDSTILL_S:
            raise StorageError(f"{self._store.name}: it lives, but sends nothing (its region: {state})") from None


class PeerStore:
    """One checkpoint in the region of one node, whose node server is at ``node_url``. Thread-safe.

    A peer may wait for bytes itself. So silence alone is no failure: after a second, the peer is asked for its
    progress on another connection. StorageError when it does not answer, or gets nothing itself for some seconds.
    """

    def __init__(self, node_url: str, model_url: str, access: PeerAccess, context: ssl.SSLContext | None) -> None:
        """``context``: what ``access.client_context()`` returned; several peers share it."""
        self.node_url = node_url
        self.name = redacted(node_url).rstrip("/")
        self._home: Target = parse_target(f"{node_url.rstrip('/')}/regions/{quote(model_url, safe='')}")
        if self._home.endpoint.tls != (context is not None):
            expected = "https" if context is not None else "http"
            raise ConfigError(f"{self.name}: expected {expected}://, as this node speaks with its cluster")
        self._headers = {
            "Authorization": f"Bearer {access.token}",
            "User-Agent": "medusa-runtime",
            READER_HEADER: os.urandom(8).hex(),
        }
        self._context = context
        self._checksum = checksum_function()
        self._pool = ConnectionPool()

    def offer(self, most_bytes: int | None = None) -> Offer | None:
        """Return the index and the files; None when they are larger than ``most_bytes``.

        ObjectNotFoundError when the peer has no region that is laid out.
        """
        with self._request("/index" if most_bytes is None else f"/index?most={most_bytes}") as (connection, response):
            if response.status == 204:
                return None
            length = response.length
            if length is None or length > _LONGEST_INDEX_BYTES:
                raise StorageError(f"{self.name}: expected an index, found {length} bytes")
            body = bytearray(length)
            self._fill(connection, memoryview(body))
        try:
            index_text, files = parse_index(bytes(body))
        except FramingError as error:
            raise WrongBytesError(f"{self.name}: {error}") from None
        if response.headers.get(CHECKSUM_HEADER.lower()) != f"{checksum_of_index(index_text, files):016x}":
            raise WrongBytesError(f"{self.name}: the index does not have its checksum")
        chunk_bytes = response.headers.get(CHUNK_BYTES_HEADER.lower(), "")
        if chunk_bytes not in map(str, PEER_CHUNK_BYTES):
            raise StorageError(f"{self.name}: expected chunks of {PEER_CHUNK_BYTES}, found {chunk_bytes[:20]!r}")
        return Offer(self.node_url, index_text, files, int(chunk_bytes))

    def progress(self) -> Progress:
        """Ask the peer how far its region is. StorageError when it does not answer, or has none."""
        connection = self._connect(_PROBE_S)
        try:
            response = connection.request(f"{self._home.path}/progress", self._headers)
            self._check(connection, response)
            body = connection.body(_ERROR_BODY_BYTES)
            found = json.loads(body)
            fetched_bytes = int(found["fetched_bytes"])
            received_bytes = int(found.get("received_bytes", fetched_bytes))  # not of earlier versions
            return Progress(str(found["state"]), fetched_bytes, received_bytes)
        except WireError as error:
            raise StorageError(f"{self.name}: {error}") from None
        except (ArithmeticError, ValueError, KeyError, TypeError, RecursionError):
            raise StorageError(f"{self.name}: expected a region's progress, found {bytes(body[:40])!r}") from None
        finally:
            connection.close()

    def read_chunks(
        self,
        key: str,
        start: int,
        buffer: memoryview,
        version: str | None,
        arrived: Callable[[Chunk], None],
        *,
        chunk_bytes: int,
        landing: Landing | None = None,
    ) -> None:
        """Fill the buffer with whole chunks of a shard from ``start`` on; ``arrived`` is called with each.

        ``landing``: where the buffer is in a region; then chunks may be published before ``arrived`` is called.

        Raises WrongBytesError, ObjectChangedError, ObjectNotFoundError, ForbiddenError, or another StorageError when
        the peer fails; what has arrived by then stays.
        """
        path = f"/shards/{quote(key, safe='')}?start={start}&stop={start + len(buffer)}"
        head, filled = memoryview(bytearray(FRAME_BYTES)), 0
        with self._request(path, {"If-Match": entity_tag_of(version)}) as (connection, _):
            while filled < len(buffer):
                if landing is not None and connection.plain:
                    self._land(connection, landing, filled // chunk_bytes, key, start, arrived)
                    return
                chunk = buffer[filled : filled + chunk_bytes]
                self._fill(connection, head, chunk)
                frame = Frame.parse(head)
                if frame.size != len(chunk) or self._checksum(chunk) != frame.checksum:
                    raise self._wrong(key, start + filled, len(chunk))
                filled += frame.size
                arrived(Chunk(frame.size, filled, frame.checksum))

    def _wrong(self, key: str, start: int, size: int) -> WrongBytesError:
        return WrongBytesError(f"{self.name}: bytes {start} to {start + size} of {key} do not have their checksum")

    def _land(
        self,
        connection: Connection,
        landing: Landing,
        done: int,
        key: str,
        start: int,
        arrived: Callable[[Chunk], None],
    ) -> None:
        """Receive the rest of a range in compiled code, which verifies each chunk before it publishes it."""
        chunks, receiving, patience = compiled(), landing.receiving(done), _Patience(self)
        assert chunks is not None
        together = max(_TOGETHER_BYTES // receiving.chunks.bytes, 1)
        while receiving.done < receiving.chunks.count:
            before, before_wire = receiving.filled_bytes, receiving.wire_bytes
            receiving.stop = min(receiving.done + together, receiving.chunks.count)
            try:
                status = connection.land(chunks, receiving)
            finally:  # what is published is not fetched again, also where the connection is given up
                filled = receiving.filled_bytes
                if filled != before:
                    arrived(Chunk(filled - before, filled, None))
            if status == WRONG:
                raise self._wrong(key, start + filled, receiving.frame.size)
            if receiving.wire_bytes != before_wire:
                patience.heard()
            if status == SILENT:
                patience.ask()
            elif status == ENDED:
                raise WireError("the answer ended early")
            elif status < 0:
                raise WireError(os.strerror(-status))

    def _fill(self, connection: Connection, *buffers: memoryview) -> None:
        """Receive all of the buffers, for as long as the peer lives and gets something itself."""
        left, patience = [*filter(len, buffers)], _Patience(self)
        while left:
            try:
                count = connection.receive_all(left)
            except StalledError:
                patience.ask()
                continue
            if not count:
                raise WireError("the answer ended early")
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
            patience.heard()

    @contextmanager
    def _request(self, path: str, headers: dict[str, str] | None = None) -> Iterator[tuple[Connection, Response]]:
        """Ask for something below the region's path. Errors are turned into this package's."""
        connection, response = self._ask(f"{self._home.path}{path}", {**self._headers, **(headers or {})})
        try:
            self._check(connection, response)
            yield connection, response
        except WireError as error:
            connection.close()
            if connection.interrupted:
                raise StorageError(
                    f"{self.name}: interrupted, because another request has brought this range"
                ) from None
            raise StorageError(f"{self.name}: {error}") from None
        finally:
            self._pool.give_back(connection)

    def _ask(self, path: str, headers: dict[str, str]) -> tuple[Connection, Response]:
        while True:
            connection, used = self._pool.take(self._home.endpoint, partial(self._connect, _ANSWER_S))
            try:
                connection.limit_silence(_ANSWER_S)
                response = connection.request(path, headers)
                connection.limit_silence(_SILENCE_S)
                return connection, response
            except WireError as error:
                connection.close()
                self._pool.give_back(connection)
                if not used or connection.interrupted:  # a peer may close an idle connection at any time
                    raise StorageError(f"{self.name}: {error}") from None

    def _connect(self, timeout_s: float) -> Connection:
        try:
            connection = Connection(
                self._home.endpoint, timeout_s, least_bytes_per_s=_LEAST_BYTES_PER_S, context=self._context
            )
        except WireError as error:
            raise UnreachableError(f"{self.name}: cannot be reached: {error}") from None
        connection.give_up_after(_UNANSWERED_S)
        return connection

    def _check(self, connection: Connection, response: Response) -> None:
        if response.status not in (200, 204):
            raise self._refusal(response.status, connection.body(_ERROR_BODY_BYTES))
        if response.length is None:
            raise StorageError(f"{self.name}: expected an answer with its length, found none")

    def _refusal(self, status: int, body: bytes) -> StorageError:
        if status == 404:
            return ObjectNotFoundError(f"{self.name}: the node has no region of this model")
        if status == 412:
            return ObjectChangedError(f"{self.name}: the node has another version of this model")
        if status in (401, 403):
            return ForbiddenError(f"{self.name}: the node refuses this cluster's token ({status})")
        words = " ".join(body.decode("utf-8", "replace").split())[:160]
        return StorageError(f"{self.name}: expected 200, found {status} ({words if words.isprintable() else ''})")

    def interrupt(self, thread: int) -> None:
        """End the ``read_chunks`` of another thread."""
        self._pool.interrupt(thread)

    def close(self) -> None:
        self._pool.close()


__all__ = ["Chunk", "Offer", "PeerStore", "Progress"]
