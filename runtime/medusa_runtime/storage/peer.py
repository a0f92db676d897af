"""A peer, that is, another node of the cluster, as a store: its region of a checkpoint, complete or not.

Each chunk comes with a checksum, made by the node that fetched it from the object store, and is verified before the
caller gets it. The checksums find damage on the way and in a node's memory. They do not protect from a node that holds
the cluster's token and lies.
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
from .compiled_chunks import CLOSED, CORRUPT, TIMED_OUT, ReceiveTarget, compiled_functions
from .framing import (
    CHECKSUM_HEADER,
    CHUNK_BYTES_HEADER,
    FRAME_BYTES,
    PEER_CHUNK_BYTES,
    READER_HEADER,
    Frame,
    FramingError,
    checksum_of_index,
    entity_tag_of,
    import_xxh3_64,
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
_ANSWER_S = 3.0  # the time limit for a connection to be made, and for an answer to begin
_SILENCE_S = 1.0  # the silence after which a peer is asked for its progress
_PROBE_S = 2.0  # the time limit for that answer
_STANDSTILL_S = 4.0  # how long a peer that answers may receive nothing itself
_UNANSWERED_S = 2.0  # the time limit for the peer's kernel to acknowledge what was sent
_LEAST_BYTES_PER_S = 1024.0
_TOGETHER_BYTES = 8 << 20  # how much compiled code receives before it returns to Python, but at least one chunk


class PeerIndex(NamedTuple):
    """What a peer has of a checkpoint: the index as text, the small files, and the size of its region's chunks."""

    node_url: str
    index_text: bytes
    files: dict[str, bytes]
    chunk_bytes: int


class Chunk(NamedTuple):
    """A verified chunk in the caller's buffer, or several chunks that are already published.

    ``filled`` counts the buffer's bytes up to the end of the chunk. ``checksum`` is None for chunks that are already
    published in the region; ``size`` is then that of all of them together.
    """

    size: int
    filled: int
    checksum: int | None


class Progress(NamedTuple):
    """How far a peer is: the state of its region, the bytes that it can send, and those that it has received.

    ``received_bytes`` includes those of unfinished chunks.
    """

    state: str
    fetched_bytes: int
    received_bytes: int


class _StallDetector:
    """Decides how long to wait for a silent peer: as long as it answers, and receives something itself."""

    def __init__(self, store: PeerStore) -> None:
        self._store = store
        self.note_progress()

    def note_progress(self) -> None:
        """Note that bytes have come."""
        self._bytes, self._at = -1, time.monotonic()

    def check(self) -> None:
        """Ask for the peer's progress after a silence. Raises StorageError if waiting longer is of no use."""
        state, _, received_bytes = self._store.progress()
        now = time.monotonic()
        if received_bytes != self._bytes and self._bytes >= 0:
            self._at = now
        self._bytes = received_bytes
        if state == "failed" or now - self._at > _STANDSTILL_S:
            raise StorageError(f"{self._store.name}: it lives, but sends nothing (its region: {state})") from None


class PeerStore:
    """One checkpoint in the region of one node, whose node server is at ``node_url``. Thread-safe.

    A peer may be waiting for bytes itself, so silence alone is not a failure. After a second of it, the peer is asked
    for its progress on another connection. StorageError is raised if it does not answer, or receives nothing itself for
    some seconds.
    """

    def __init__(self, node_url: str, model_url: str, access: PeerAccess, context: ssl.SSLContext | None) -> None:
        """``context`` is what ``access.client_context()`` returned. It is passed in because all peers share one."""
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
        self._checksum = import_xxh3_64()
        self._pool = ConnectionPool()

    def read_index(self, most_bytes: int | None = None) -> PeerIndex | None:
        """Fetch the index and the files; None if they are larger than ``most_bytes``.

        Raises ObjectNotFoundError if the peer has no region of the model, or one that is not laid out yet.
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
        return PeerIndex(self.node_url, index_text, files, int(chunk_bytes))

    def progress(self) -> Progress:
        """Ask the peer how far its region is. Raises StorageError if it does not answer, or has no such region."""
        connection = self._connect(_PROBE_S)
        try:
            response = connection.request(f"{self._home.path}/progress", self._headers)
            self._check(connection, response)
            body = connection.body(_ERROR_BODY_BYTES)
            found = json.loads(body)
            fetched_bytes = int(found["fetched_bytes"])
            received_bytes = int(found.get("received_bytes", fetched_bytes))  # earlier versions do not send it
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
        receive_target: ReceiveTarget | None = None,
    ) -> None:
        """Fill the buffer with whole chunks of the shard ``key``, from byte ``start`` on. Call ``arrived`` with each.

        ``receive_target`` says where the buffer lies in a region. With it, chunks may be published there before
        ``arrived`` is called.

        Raises WrongBytesError, ObjectChangedError, ObjectNotFoundError, ForbiddenError, or another StorageError if the
        peer fails. Chunks that have arrived by then remain in the buffer.
        """
        path = f"/shards/{quote(key, safe='')}?start={start}&stop={start + len(buffer)}"
        head, filled = memoryview(bytearray(FRAME_BYTES)), 0
        with self._request(path, {"If-Match": entity_tag_of(version)}) as (connection, _):
            while filled < len(buffer):
                if receive_target is not None and connection.plain:
                    self._receive_compiled(connection, receive_target, filled // chunk_bytes, key, start, arrived)
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

    def _receive_compiled(
        self,
        connection: Connection,
        receive_target: ReceiveTarget,
        done: int,
        key: str,
        start: int,
        arrived: Callable[[Chunk], None],
    ) -> None:
        """Receive the rest of a range in compiled code, which verifies and publishes each chunk. ``done`` have come."""
        chunks, job, stall = compiled_functions(), receive_target.receive_job(done), _StallDetector(self)
        assert chunks is not None
        together = max(_TOGETHER_BYTES // job.chunks.bytes, 1)
        while job.done < job.chunks.count:
            before, before_wire = job.filled_bytes, job.wire_bytes
            job.stop = min(job.done + together, job.chunks.count)
            try:
                status = connection.receive_chunks(chunks, job)
            finally:  # published chunks must not be fetched again, even if the connection is given up
                filled = job.filled_bytes
                if filled != before:
                    arrived(Chunk(filled - before, filled, None))
            if status == CORRUPT:
                raise self._wrong(key, start + filled, job.frame.size)
            if job.wire_bytes != before_wire:
                stall.note_progress()
            if status == TIMED_OUT:
                stall.check()
            elif status == CLOSED:
                raise WireError("the answer ended early")
            elif status < 0:
                raise WireError(os.strerror(-status))

    def _fill(self, connection: Connection, *buffers: memoryview) -> None:
        """Fill all of the buffers, as long as the peer answers and receives something itself."""
        left, stall = [*filter(len, buffers)], _StallDetector(self)
        while left:
            try:
                count = connection.receive_all(left)
            except StalledError:
                stall.check()
                continue
            if not count:
                raise WireError("the answer ended early")
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
            stall.note_progress()

    @contextmanager
    def _request(self, path: str, headers: dict[str, str] | None = None) -> Iterator[tuple[Connection, Response]]:
        """Send a GET for ``path`` below the region's, and yield the connection and a response of 200 or 204.

        A WireError in the body, and any other answer, becomes a StorageError.
        """
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
                # A connection that was used before is tried again: a peer may close an idle one at any time.
                if not used or connection.interrupted:
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


__all__ = ["Chunk", "PeerIndex", "PeerStore", "Progress"]
