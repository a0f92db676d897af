"""Several sources of one checkpoint: peers that have it, and the object store behind them.

A range comes from the first source that is fit. When that source dies, stalls or sends wrong bytes, the next one
continues with the first chunk that is missing. The object store is the last: where peers have a checkpoint, it sends
only what none of them sends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import (
    ConfigError,
    ForbiddenError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
    WrongBytesError,
)
from .base import Advance, ObjectInfo, Store
from .compiled_chunks import ReceiveTarget
from .framing import is_bundle_file
from .peer import Chunk, PeerIndex, PeerStore
from .retry import doubling_pause_s

logger = logging.getLogger(__name__)

# The number of connections that read from peers. In a chain, each chunk should come alone and in order; a second
# connection fills the pause between two ranges of the first.
_CONNECTIONS = 2
# A plan names nodes that are about to begin. For this long after the start, wait for peers before the object store is
# asked; otherwise each node of a chain would begin with the store.
_GRACE_S = 2.0
_RETRY_S = 0.05
# For this long, only the last source is asked for the index: in a chain, the others are only about to get it.
_OTHERS_S = 0.15
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0  # before a peer that failed is tried again
_MOST_FAILURES = 3  # in a row, after which a peer no longer counts as a source (it is still tried)
_LITTLE_BYTES = 1 << 20  # the largest index with files that is taken from a peer that is not the first
_CURRENT_WITHIN_S = 1.0  # the time that the object store has to confirm versions
_ASK_EVERY_S = 2.0  # how often to ask for other peers, once the known ones have failed
_LOOK_S = 2.0  # how often to check, while the object store sends, whether a peer now has more than this node
_REPORT_S = 1.0
# How long to go on while neither peers nor the object store send anything: before the first bytes, and after them. A
# link that is down for a minute, with connections that are tried again every ten seconds, should not cost the bytes
# that have arrived.
_PATIENCE_S, _PATIENCE_BEGUN_S = 30.0, 120.0
_THREADS = 8

ORIGIN = "store"  # the object store's name among the sources


@dataclass(eq=False)
class _Peer:
    """A peer and its record.

    ``excluded`` is why the peer is no longer asked. After ``failures`` in a row, it is asked again at ``retry_at``.
    """

    store: PeerStore
    excluded: str | None = None
    failures: int = 0
    retry_at: float = 0.0
    received_bytes: int = 0

    def is_available(self, now: float) -> bool:
        return self.excluded is None and now >= self.retry_at


class _PeerIsAhead(Exception):
    """While this node reads from the object store, a peer has got more of the checkpoint than this node has."""


class SourcesStore:
    """The store of a checkpoint that peers may have. Thread-safe.

    ``origin`` is the object store. What peers do not have (the objects' sizes, other files) is read from it. ``close``
    closes it, too.
    """

    reuses_buffer = False
    interruptible = True

    def __init__(
        self,
        origin: Store,
        open_peer: Callable[[str], PeerStore],
        *,
        find_peers: Callable[[bool], Sequence[str]],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Ask for the peers of the plan, and open them.

        ``find_peers(again)`` returns the URLs of the node servers that have the checkpoint, or will have it, best
        first. ``again`` is False in the first call, and True when those peers have failed and others are sought.

        ``on_change`` is called, from any thread, when a peer is excluded, and about once a second while bytes come.
        """
        self.url = origin.url
        self._origin = origin
        self._open_peer = open_peer
        self._find_peers = find_peers
        self._on_change = on_change
        self._peers: dict[str, _Peer] = {}
        self._checksums: dict[tuple[str, int], int] = {}
        self._bundle: Mapping[str, bytes] = {}
        self._chunk_bytes = 1
        self._receive_target: Callable[[str, int, int], ReceiveTarget | None] | None = None
        self._lock = threading.Lock()
        self._adding = threading.Lock()
        self._interrupted: set[int] = set()
        self._origin_bytes = 0
        self._grace_until = time.monotonic() + _GRACE_S
        self._asked_at = time.monotonic()
        self._origin_failed = False
        self._report_at = 0.0
        self._add(find_peers(False))

    def _add(self, node_urls: Sequence[str]) -> None:
        with self._adding:  # no peer is opened twice: the first object would never be closed
            for url in node_urls:
                if url not in self._peers:
                    try:
                        self._peers[url] = _Peer(self._open_peer(url))
                    except ConfigError as error:
                        logger.warning("a peer is left out: %s", error)

    @property
    def connections(self) -> int | None:
        """How many connections should read ranges: few from peers; None where only the object store is left.

        With a number, this store itself deals with late answers, so the caller need not hedge.
        """
        return _CONNECTIONS if any(peer.failures < _MOST_FAILURES for peer in self._alive()) else None

    def _alive(self) -> list[_Peer]:
        return [peer for peer in list(self._peers.values()) if peer.excluded is None]

    def peer_indexes(self) -> Generator[PeerIndex]:
        """Yield what peers have of the checkpoint, the first answer first; nothing if no peer has it soon enough.

        The caller takes the next index only if the last one was of no use, which it reports with ``exclude``.
        """
        pool, began = ThreadPoolExecutor(max(len(self._peers), 1), "peer-index"), time.monotonic()
        try:
            while alive := self._alive():
                now = time.monotonic()
                if now - began < _OTHERS_S:
                    alive = alive[-1:]
                yield from self._ask_all([peer for peer in alive if peer.is_available(now)], pool)
                if time.monotonic() > self._grace_until:
                    return
                time.sleep(_RETRY_S)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask_all(self, available: list[_Peer], pool: ThreadPoolExecutor) -> Iterator[PeerIndex]:
        """Ask these peers at once, and yield what they have."""
        if len(available) == 1:
            answers: Iterator[PeerIndex | None] = map(self._ask_one, available)
        else:
            answers = (
                future.result() for future in as_completed([pool.submit(self._ask_one, each) for each in available])
            )
        yield from (found for found in answers if found is not None)

    def _ask_one(self, peer: _Peer) -> PeerIndex | None:
        """Ask a peer for the index; None if it fails, or has a large one and is not the first peer.

        Only the first peer is asked for a large index: all nodes of a chain may ask each of the others.
        """
        first = next(iter(self._peers.values()))
        try:
            return peer.store.read_index(None if peer is first else _LITTLE_BYTES)
        except StorageError as error:
            self._record_failure(peer, error)
            return None

    def is_current(self, versions: Mapping[str, str | None]) -> bool:
        """Return False if the object store reports another version of any object within a second, or else True."""
        pool = ThreadPoolExecutor(_THREADS, "current")
        try:
            found = {pool.submit(self._origin.stat, key): version for key, version in versions.items()}
            for future in wait(found, _CURRENT_WITHIN_S).done:
                with suppress(Exception):  # a store that does not answer proves nothing about its objects
                    if future.result().version != found[future]:
                        return False
            return True
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def exclude(self, node_url: str, reason: str) -> None:
        """Stop asking a peer, and log the reason once."""
        peer = self._peers[node_url]
        with self._lock:
            if peer.excluded is not None:
                return
            peer.excluded = reason
        logger.warning("the peer %s is not asked any more: %s", peer.store.name, reason)
        self._on_change()

    def take_bundle(self, files: Mapping[str, bytes]) -> None:
        """Serve these files of the state bundle, which a peer has sent, from memory instead of the object store."""
        self._bundle = files

    def set_layout(
        self, chunk_bytes: int, receive_target: Callable[[str, int, int], ReceiveTarget | None] | None = None
    ) -> None:
        """Set the size of the region's chunks. A range that moves to another source continues with a whole chunk.

        ``receive_target(key, start, stop)`` returns where the region has these bytes, so that peers' chunks can be
        published as they come, or None.
        """
        self._chunk_bytes = chunk_bytes
        self._receive_target = receive_target

    def checksum(self, key: str, start: int) -> int | None:
        """Return the verified checksum that came from a peer with the chunk at ``start``, and forget it."""
        return self._checksums.pop((key, start), None)

    def status(self) -> dict[str, object]:
        """Return how many bytes came from each source, and why excluded peers are no longer asked."""
        peers = list(self._peers.values())
        received = {peer.store.name: peer.received_bytes for peer in peers}
        return {
            "received_bytes": {**received, ORIGIN: self._origin_bytes},
            "excluded": {peer.store.name: peer.excluded for peer in peers if peer.excluded is not None},
        }

    def stat(self, key: str) -> ObjectInfo:
        if (body := self._bundle.get(key)) is not None:
            return ObjectInfo(len(body), None)
        return self._origin.stat(key)

    def read(self, key: str, start: int, stop: int, version: str | None = None) -> tuple[bytes, ObjectInfo]:
        if (body := self._bundle.get(key)) is not None:
            return body[start:stop], ObjectInfo(len(body), None)
        return self._origin.read(key, start, stop, version)

    def local_path(self, key: str) -> Path | None:
        return None

    def read_into(
        self,
        key: str,
        start: int,
        buffer: memoryview,
        version: str | None = None,
        advance: Advance | None = None,
        length: int | None = None,
    ) -> None:
        """Fill the buffer from the first source that is fit, and continue with the next one when it fails.

        ``start`` must be the start of a chunk, and the buffer must end where a chunk ends. This does not hold for a
        state bundle's files, which have no chunks.
        """
        if is_bundle_file(key):
            if (body := self._bundle.get(key)) is not None:
                buffer[:] = body[start : start + len(buffer)]
            else:
                self._origin.read_into(key, start, buffer, version, advance, length)
            return
        filled, patient_until = 0, time.monotonic() + self._patience_s
        self._interrupted.discard(threading.get_ident())

        def moved(count: int) -> None:
            nonlocal filled, patient_until
            filled, now = count, time.monotonic()
            patient_until = now + _PATIENCE_BEGUN_S
            if now > self._report_at:
                self._report_at = now + _REPORT_S
                self._on_change()
            if advance:
                advance(count)

        while filled < len(buffer):
            base = filled = filled - filled % self._chunk_bytes
            peer = self._choose()
            try:
                if peer is None:
                    self._read_origin(key, start, buffer, base, version, moved)
                    return
                self._read_peer(peer, key, start, buffer, base, version, moved)
            except _PeerIsAhead:
                continue
            except StorageError as error:
                if threading.get_ident() in self._interrupted:
                    raise
                if peer is not None:
                    self._record_failure(peer, error)
                elif time.monotonic() > patient_until or not self._may_recover(error):
                    raise
                else:
                    self._origin_failed = True  # so peers are sought even if none had the checkpoint before
                    logger.debug("trying again: %s", error)
                    time.sleep(_RETRY_S)

    @property
    def _patience_s(self) -> float:
        begun = self._origin_bytes or any(peer.received_bytes for peer in list(self._peers.values()))
        return _PATIENCE_BEGUN_S if begun else _PATIENCE_S

    def _may_recover(self, error: StorageError) -> bool:
        """Return whether to wait after the object store has failed: for peers, or for a store that has sent something.

        Other nodes wait for what this one gets, so it does not give up as soon as a single fetch would.
        """
        if isinstance(error, ObjectChangedError):
            return False
        refused = isinstance(error, ForbiddenError | ObjectNotFoundError)
        return bool(self._alive()) or (self._origin_bytes > 0 and not refused)

    def _read_peer(
        self,
        peer: _Peer,
        key: str,
        start: int,
        buffer: memoryview,
        base: int,
        version: str | None,
        moved: Callable[[int], None],
    ) -> None:
        def arrived(chunk: Chunk) -> None:
            end = base + chunk.filled
            if chunk.checksum is not None:
                self._checksums[key, start + end - chunk.size] = chunk.checksum
            peer.received_bytes += chunk.size
            peer.failures = 0
            moved(end)

        receive_target = self._receive_target and self._receive_target(key, start + base, start + len(buffer))
        peer.store.read_chunks(
            key,
            start + base,
            buffer[base:],
            version,
            arrived,
            chunk_bytes=self._chunk_bytes,
            receive_target=receive_target,
        )

    def _read_origin(
        self,
        key: str,
        start: int,
        buffer: memoryview,
        base: int,
        version: str | None,
        moved: Callable[[int], None],
    ) -> None:
        seen, look_at = 0, time.monotonic() + _LOOK_S

        def advance(count: int) -> None:
            nonlocal seen, look_at
            with self._lock:
                self._origin_bytes += count - seen
            before, seen = seen, count
            moved(base + count)
            if before // self._chunk_bytes < count // self._chunk_bytes and time.monotonic() > look_at:
                if self._is_behind():
                    raise _PeerIsAhead
                look_at = time.monotonic() + _LOOK_S

        self._origin.read_into(key, start + base, buffer[base:], version, advance)

    def _is_behind(self) -> bool:
        """Return whether a peer that may be asked now has more of the checkpoint than this node."""
        own_bytes = self._origin_bytes + sum(peer.received_bytes for peer in list(self._peers.values()))
        for peer in self._alive():
            if peer.is_available(time.monotonic()):
                try:
                    if peer.store.progress().fetched_bytes > own_bytes:
                        return True
                except StorageError as error:
                    self._record_failure(peer, error)
        return False

    def _choose(self) -> _Peer | None:
        """Return the first available peer; None for the object store. During the grace period, wait for a peer."""
        while True:
            now = time.monotonic()
            for peer in list(self._peers.values()):
                if peer.is_available(now):
                    return peer
            if not self._alive() or now > self._grace_until:
                if now - self._asked_at < _ASK_EVERY_S or not (self._peers or self._origin_failed):
                    return None
                self._asked_at = now
                self._add(self._find_peers(True))
                continue
            time.sleep(_RETRY_S)

    def _record_failure(self, peer: _Peer, error: StorageError) -> None:
        if isinstance(error, WrongBytesError):
            self.exclude(peer.store.node_url, f"it sends wrong bytes ({error})")
        elif isinstance(error, ObjectChangedError):
            self.exclude(peer.store.node_url, "it has another version")
        elif isinstance(error, ForbiddenError):
            self.exclude(peer.store.node_url, str(error))
        else:
            peer.failures += 1
            now = time.monotonic()
            pause_s = doubling_pause_s(peer.failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            if isinstance(error, ObjectNotFoundError) and now < self._grace_until:
                pause_s = _RETRY_S
            elif peer.failures == 1:
                logger.info("going on without the peer %s for now: %s", peer.store.name, error)
            peer.retry_at = now + pause_s

    def interrupt(self, thread: int) -> None:
        self._interrupted.add(thread)
        for peer in list(self._peers.values()):
            peer.store.interrupt(thread)
        self._origin.interrupt(thread)

    def close(self) -> None:
        for peer in list(self._peers.values()):
            peer.store.close()
        self._origin.close()


__all__ = ["ORIGIN", "SourcesStore"]
