"""Sending weights: a thread for each answer, which waits for a region's chunks and sends each one as it arrives.

An event loop would run about a hundred lines of Python for each chunk. A thread makes two system calls: one sends the
frame, the other the region's pages (sendfile). The bytes are never copied in this process.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

from medusa_runtime.errors import NodeError
from medusa_runtime.region.checksummed import ChecksummedRegion
from medusa_runtime.storage.compiled_chunks import DONE, STOPPED, TIMED_OUT, CompiledChunks, SendJob, compiled_functions
from medusa_runtime.storage.framing import Frame

from .pacing import Pacer

_MOST_RUN = 64  # chunks that are sent before another answer to the same reader gets its turn
_LEAST_BYTES_PER_S = 64 << 10  # a slower reader is given up
_PATIENCE_S = 10.0  # then a peer that takes nothing is given up
_QUIET_S = 60.0  # then a region that receives nothing is given up
_POLL_S = 0.5  # between two checks that the region still has a prefetcher
_STOP_S = 0.1  # between two checks that the peer is still there
_ENCRYPTED_BYTES = 1 << 20
_NEXT_S = 0.05  # how long an answer waits for its next chunk before another answer to the same reader goes first


class ReaderQueues:
    """The answers that each reader waits for, in the order of its requests.

    A fetch asks for its next range before the current one is complete. If both were sent at the same time, each would
    arrive half as fast, and each node of a chain would be two chunks behind the one before it instead of one.
    """

    def __init__(self) -> None:
        self._readers: WeakValueDictionary[str, ReaderQueue] = WeakValueDictionary()

    def of(self, reader: str) -> ReaderQueue:
        """Return the answers to one reader. Call this in one thread only."""
        return self._readers.setdefault(reader, ReaderQueue())


class ReaderQueue:
    """The answers to one reader. Whoever holds the lock ``sending`` sends."""

    def __init__(self) -> None:
        self.sending = threading.Lock()
        self._changed = threading.Condition()
        self._answers: list[object] = []

    @contextmanager
    def queued(self, answer: object) -> Iterator[None]:
        with self._changed:
            self._answers.append(answer)
        try:
            yield
        finally:
            with self._changed:
                self._answers.remove(answer)
                self._changed.notify_all()

    def is_first(self, answer: object) -> bool:
        """Return whether this answer is the reader's oldest one under way, whose chunks come next."""
        with self._changed:
            return self._answers[0] is answer

    def pause(self, answer: object, wait: Callable[[float], None]) -> None:
        """Wait for an answer's next chunk by calling ``wait(timeout_s)``, if the answer is the first.

        So a chunk wakes one thread only. The other answers check for their chunks when the first one ends or has to
        wait.
        """
        with self._changed:
            if self._answers[0] is not answer:
                self._changed.wait(_STOP_S)
                return
            self._changed.notify_all()
        wait(_STOP_S)


class PeerWriter(Protocol):
    """A writer of bytes to a peer.

    Both methods raise OSError when the peer has gone, or has not taken the bytes by ``deadline`` (monotonic seconds).
    """

    connection: socket.socket

    def write(self, data: bytes, deadline: float) -> None: ...

    def send_file(self, descriptor: int, offset: int, size: int, deadline: float) -> None: ...


class PlainWriter:
    """A writer over plain TCP, by a duplicate of a connection's socket. Close it.

    The connection's owner must not write meanwhile.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection.dup()
        self._writable = select.poll()
        self._writable.register(self.connection, select.POLLOUT)

    def write(self, data: bytes, deadline: float) -> None:
        """Send bytes in one packet with the bytes that follow, so that the reader is woken once."""
        while data:
            try:
                data = data[self.connection.send(data, socket.MSG_MORE | socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self._wait(deadline)

    def send_file(self, descriptor: int, offset: int, size: int, deadline: float) -> None:
        stop, out = offset + size, self.connection.fileno()
        while offset < stop:
            try:
                count = os.sendfile(out, descriptor, offset, stop - offset)
            except BlockingIOError:
                self._wait(deadline)
                continue
            if not count:
                raise ConnectionResetError("the region has ended early")
            offset += count

    def _wait(self, deadline: float) -> None:
        if not self._writable.poll(max(deadline - time.monotonic(), 0.0) * 1000):
            raise TimeoutError("the peer takes nothing")

    def close(self) -> None:
        self.connection.close()


class EncryptedWriter:
    """A writer over TLS, which sendfile cannot do.

    ``write(data, within_s)`` passes bytes to the event loop, which encrypts them. That costs two switches between
    threads, so a frame goes with the bytes behind it, and these in large pieces.
    """

    def __init__(self, connection: socket.socket, write: Callable[[bytearray, float], None]) -> None:
        self.connection = connection
        self._write = write
        self._head = b""

    def write(self, data: bytes, deadline: float) -> None:
        """Send bytes together with the bytes that follow."""
        self._head += data

    def send_file(self, descriptor: int, offset: int, size: int, deadline: float) -> None:
        stop = offset + size
        while offset < stop:
            head, self._head = self._head, b""
            piece = bytearray(head) + bytearray(min(_ENCRYPTED_BYTES, stop - offset))
            count = os.preadv(descriptor, [memoryview(piece)[len(head) :]], offset)
            if not count:
                raise ConnectionResetError("the region has ended early")
            del piece[len(head) + count :]
            self._write(piece, max(deadline - time.monotonic(), 0.0))
            offset += count

    def close(self) -> None:
        """Do nothing: the connection belongs to the event loop."""


class RangeSender:
    """The sending of a range of a region's chunks to one peer.

    ``gone()`` returns whether the peer has gone. ``sent`` is called with the number of bytes sent, in the thread of
    ``run``.
    """

    def __init__(
        self,
        region: ChecksummedRegion,
        chunks: range,
        writer: PeerWriter,
        *,
        queue: ReaderQueue,
        pacer: Pacer,
        gone: Callable[[], bool],
        sent: Callable[[int], None],
    ) -> None:
        self._region = region
        self._chunks = chunks
        self._writer = writer
        self._queue = queue
        self._pacer = pacer
        self._gone = gone
        self._sent = sent
        self._stopped = False
        self._under_way: SendJob | None = None

    def stop(self) -> None:
        """Make ``run`` end soon. Can be called from any thread."""
        self._stopped = True
        if (under_way := self._under_way) is not None:
            under_way.stopped = 1

    def run(self) -> None:
        """Send all chunks, each as soon as it is there. Raises MedusaError or OSError if that is impossible."""
        next_chunk = self._chunks.start
        with self._queue.queued(self):
            while next_chunk < self._chunks.stop:
                ready = self._wait(next_chunk, min(self._chunks.stop - next_chunk, _MOST_RUN))
                with self._queue.sending:
                    if isinstance(self._writer, PlainWriter) and (chunks := compiled_functions()) is not None:
                        next_chunk += self._send_compiled(chunks, range(next_chunk, self._chunks.stop))
                    else:
                        self._send(range(next_chunk, next_chunk + ready))
                        next_chunk += ready

    def _wait(self, first: int, most: int) -> int:
        """Wait until chunk ``first`` is there. Return how many are there from it on without a gap, up to ``most``."""
        region = self._region
        if ready := region.present(first, most):
            return ready
        looked = changed = time.monotonic()
        seen_bytes = region.fetched_bytes  # read before the check, so that a chunk which comes after it ends the wait
        received_bytes = region.received_bytes
        while not (ready := region.present(first, most)):
            if self._stopped or self._gone():
                raise ConnectionResetError("the peer has gone")
            self._queue.pause(self, partial(region.wait_for_more, seen_bytes))
            now, seen_bytes = time.monotonic(), region.fetched_bytes
            if now - looked < _POLL_S:
                continue
            looked = now
            # In a chain, chunks come in the order of the requests. Otherwise this chunk may be far down the schedule.
            if self._queue.is_first(self):
                region.demand(first)
            if region.received_bytes != received_bytes:
                received_bytes, changed = region.received_bytes, now
            if (now - changed > _QUIET_S or not region.is_live) and not region.has(first):
                raise NodeError("the region is not being filled")
        return ready

    def _send_compiled(self, compiled_chunks: CompiledChunks, chunks: range) -> int:
        """Send the first of these chunks and those that follow soon after it, in compiled code. Return their number."""
        sending = self._region.send_job(chunks)
        sending.connection = self._writer.connection.fileno()
        sending.idle_ms = int(_NEXT_S * 1000)
        slowest = min(_LEAST_BYTES_PER_S, self._pacer.bytes_per_s or _LEAST_BYTES_PER_S)
        sending.patience_ms = int((_PATIENCE_S + self._region.chunk_bytes / slowest) * 1000)
        self._under_way = sending
        if self._stopped:  # `stop` was called before `_under_way` was set
            sending.stopped = 1
        with self._pacer.sending(self._writer.connection):
            status = compiled_chunks.send(sending)
        self._sent(sending.sent_bytes)
        if status == STOPPED:
            raise ConnectionResetError("the server ends")
        if status not in (DONE, TIMED_OUT):
            raise OSError(-status, os.strerror(-status)) if status < 0 else ConnectionResetError("the region has ended")
        return int(sending.done)

    def _send(self, chunks: range) -> None:
        """Send neighbouring chunks that are all there, each behind its frame."""
        region, writer = self._region, self._writer
        descriptor, at = region.file.fileno(), region.offset(chunks.start)
        sizes = [region.chunks.size(chunk) for chunk in chunks]
        slowest = min(_LEAST_BYTES_PER_S, self._pacer.bytes_per_s or _LEAST_BYTES_PER_S)
        deadline = time.monotonic() + _PATIENCE_S + sum(sizes) / slowest
        with self._pacer.sending(writer.connection):
            for chunk, size in zip(chunks, sizes, strict=True):
                if self._stopped:
                    raise ConnectionResetError("the server ends")
                writer.write(Frame(size, region.checksum(chunk)).pack(), deadline)
                writer.send_file(descriptor, at, size, deadline)
                at += size
                self._sent(size)


__all__ = ["EncryptedWriter", "PeerWriter", "PlainWriter", "RangeSender", "ReaderQueue", "ReaderQueues"]
