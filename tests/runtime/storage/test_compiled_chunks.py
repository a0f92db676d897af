"""Chunks that compiled code sends from one region and receives into another, over a pair of sockets."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from medusa_runtime.errors import StorageError
from medusa_runtime.storage import peer
from medusa_runtime.storage.compiled_chunks import (
    CLOSED,
    CORRUPT,
    DONE,
    STOPPED,
    TIMED_OUT,
    ChunkPointers,
    CompiledChunks,
    ReceiveTarget,
    SendJob,
    compiled_functions,
)
from medusa_runtime.storage.framing import Frame, import_xxh3_64
from medusa_runtime.storage.peer_access import PeerAccess
from scripted_server import ScriptedServer

CHUNK, LAST, COUNT = 256 << 10, 77, 5
SIZE = CHUNK * (COUNT - 1) + LAST


class Half:
    """Marks and bytes of one side, as a region has them."""

    def __init__(self) -> None:
        self.table, self.sums = (ctypes.c_uint8 * COUNT)(), (ctypes.c_uint64 * COUNT)()
        self.words = (ctypes.c_uint64 * 2)()
        self.file = os.memfd_create("half")
        os.ftruncate(self.file, SIZE)
        self.data = (ctypes.c_uint8 * SIZE)()
        addresses = map(ctypes.addressof, (self.table, self.sums, self.words))
        self.at = ChunkPointers(COUNT, CHUNK, LAST, *addresses, ctypes.addressof(self.words) + 8)


@pytest.fixture
def functions() -> CompiledChunks:
    found = compiled_functions()
    if found is None:
        pytest.skip("the library is not built")
    return found


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    one.setblocking(False)
    with one, other:
        yield one, other


def _publish(functions: CompiledChunks, half: Half, data: bytes, chunk: int) -> None:
    piece = data[chunk * CHUNK : (chunk + 1) * CHUNK]
    os.pwrite(half.file, piece, chunk * CHUNK)
    functions.publish(half.at, chunk, import_xxh3_64()(piece))


def test_chunks_are_sent_as_they_come_and_published_once(
    functions: CompiledChunks, pair: tuple[socket.socket, socket.socket]
) -> None:
    source, target, data = Half(), Half(), os.urandom(SIZE)
    sending = SendJob(chunks=source.at, file=source.file, connection=pair[0].fileno(), idle_ms=2000)
    sending.patience_ms = 5000
    status: list[int] = []
    thread = threading.Thread(target=lambda: status.append(functions.send(sending)))
    thread.start()
    job = ReceiveTarget(target.at, ctypes.addressof(target.data), populate=True).receive_job(0)
    job.connection, job.silence_ms, job.wake_bytes = pair[1].fileno(), 2000, 1
    for chunk in range(COUNT):
        _publish(functions, source, data, chunk)
        job.stop = chunk + 1
        assert functions.receive(job) == DONE
        assert list(target.table) == [1] * (chunk + 1) + [0] * (COUNT - chunk - 1)
    thread.join(5.0)
    functions.publish(target.at, 0, 1)
    assert (status, sending.sent_bytes, target.words[0], list(target.sums)) == ([DONE], SIZE, SIZE, list(source.sums))
    assert bytes(target.data) == data
    assert 0 < target.words[1] <= time.monotonic_ns()


@pytest.mark.parametrize("change", ["byte", "size"])
def test_a_wrong_chunk_is_not_published(
    functions: CompiledChunks, pair: tuple[socket.socket, socket.socket], change: str
) -> None:
    target, piece = Half(), bytearray(os.urandom(CHUNK))
    frame = Frame(CHUNK - (change == "size"), import_xxh3_64()(bytes(piece))).pack()
    piece[1000] ^= change == "byte"
    threading.Thread(target=pair[1].sendall, args=(frame + piece,), daemon=True).start()
    job = ReceiveTarget(target.at, ctypes.addressof(target.data), populate=False).receive_job(0)
    job.connection, job.silence_ms, job.wake_bytes, job.stop = pair[0].fileno(), 2000, 1, COUNT
    assert functions.receive(job) == CORRUPT
    assert not any(target.table)
    assert (job.done, target.words[0]) == (0, 0)


def test_a_silence_an_end_and_a_stop_are_told_apart(
    functions: CompiledChunks, pair: tuple[socket.socket, socket.socket]
) -> None:
    half = Half()
    sending = SendJob(chunks=half.at, file=half.file, connection=pair[0].fileno(), idle_ms=10, patience_ms=100)
    assert functions.send(sending) == TIMED_OUT
    sending.stopped = 1
    assert functions.send(sending) == STOPPED
    job = ReceiveTarget(half.at, ctypes.addressof(half.data), populate=False).receive_job(0)
    job.connection, job.silence_ms, job.wake_bytes, job.stop = pair[0].fileno(), 10, 1, COUNT
    assert functions.receive(job) == TIMED_OUT
    pair[1].sendall(b"1234")
    assert (functions.receive(job), job.wire_bytes) == (TIMED_OUT, 4)
    pair[1].close()
    assert functions.receive(job) == CLOSED


def test_a_signal_is_not_taken_for_a_silence(
    functions: CompiledChunks, pair: tuple[socket.socket, socket.socket]
) -> None:
    half, signals = Half(), list[int]()
    before = signal.signal(signal.SIGALRM, lambda number, _: signals.append(number))
    job = ReceiveTarget(half.at, ctypes.addressof(half.data), populate=False).receive_job(0)
    job.connection, job.silence_ms, job.wake_bytes, job.stop = pair[0].fileno(), 400, 1, COUNT
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    began = time.monotonic()
    try:
        assert functions.receive(job) == TIMED_OUT
    finally:
        signal.signal(signal.SIGALRM, before)
    assert (signals, time.monotonic() - began >= 0.4) == ([signal.SIGALRM], True)


def test_what_a_peer_brought_before_it_was_given_up_is_told(
    functions: CompiledChunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that are published and not told of would be fetched again, into memory that readers have."""
    for name, value in (("_LEAST_BYTES_PER_S", 1e15), ("_ANSWER_S", 0.2), ("_SILENCE_S", 0.3)):
        monkeypatch.setattr(peer, name, value)
    target, data, told = Half(), os.urandom(SIZE), list[peer.Chunk]()
    pieces = [data[chunk * CHUNK : (chunk + 1) * CHUNK] for chunk in range(COUNT)]
    frames = [Frame(len(piece), import_xxh3_64()(piece)).pack() + piece for piece in pieces]

    def answer(_: bytes) -> Iterator[bytes]:
        yield f"HTTP/1.1 200 OK\r\nContent-Length: {sum(map(len, frames))}\r\n\r\n".encode()
        time.sleep(0.1)  # so that the body comes by itself
        yield frames[0] + frames[1]

    with ScriptedServer(answer, kept=True) as server:
        store = peer.PeerStore(server.url, "s3://bucket/model", PeerAccess("0123456789abcdef"), None)
        receive_target = ReceiveTarget(target.at, ctypes.addressof(target.data), populate=False)
        buffer = memoryview(target.data).cast("B")
        with pytest.raises(StorageError, match="only"):
            store.read_chunks("shard", 0, buffer, '"v"', told.append, chunk_bytes=CHUNK, receive_target=receive_target)
        store.close()
    assert list(target.table) == [1, 1, 0, 0, 0]
    assert sum(chunk.size for chunk in told) == 2 * CHUNK
