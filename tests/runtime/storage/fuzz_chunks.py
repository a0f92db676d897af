"""Run by test_chunks_fuzz.py with a library that AddressSanitizer watches: what a peer may send to compiled code.

LD_PRELOAD=libasan.so python fuzz_chunks.py LIBRARY
"""

from __future__ import annotations

import ctypes
import os
import random
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "support/processes"))
from fuzzing import fuzz
from hypothesis import strategies as st
from medusa_runtime.storage import compiled_chunks
from medusa_runtime.storage.compiled_chunks import (
    CLOSED,
    CORRUPT,
    DONE,
    TIMED_OUT,
    ChunkPointers,
    ReceiveTarget,
    SendJob,
)
from medusa_runtime.storage.framing import FRAME_BYTES, Frame, import_xxh3_64

CHECKSUM = import_xxh3_64()
CHUNK, LAST, COUNT = 48, 7, 4
SIZE = CHUNK * (COUNT - 1) + LAST


class Half:
    """Marks and bytes of one side; each is memory of its own, so that a byte beside it is noticed."""

    def __init__(self) -> None:
        self.table, self.sums = (ctypes.c_uint8 * COUNT)(), (ctypes.c_uint64 * COUNT)()
        self.words = (ctypes.c_uint64 * 2)()
        self.data = (ctypes.c_uint8 * SIZE)()
        addresses = map(ctypes.addressof, (self.table, self.sums, self.words))
        self.at = ChunkPointers(COUNT, CHUNK, LAST, *addresses, ctypes.addressof(self.words) + 8)


def pieces(data: bytes) -> list[bytes]:
    return [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]


def framed(data: bytes) -> bytes:
    return b"".join(Frame(len(piece), CHECKSUM(piece)).pack() + piece for piece in pieces(data))


def receive(sent: bytes) -> None:
    """Whatever comes, in whatever parts: what is published has its checksum, and nothing else is touched."""
    functions = compiled_chunks.compiled_functions()
    assert functions is not None
    half, chance = Half(), random.Random(sent)
    one, other = socket.socketpair()
    with one, other:
        job = ReceiveTarget(half.at, ctypes.addressof(half.data), populate=False).receive_job(0)
        job.connection, job.silence_ms, job.wake_bytes = other.fileno(), 0, 1
        status, at = TIMED_OUT, 0
        while status in (TIMED_OUT, DONE) and job.done < COUNT:
            step = chance.choice((1, 5, FRAME_BYTES, 60, len(sent)))
            if at >= len(sent):
                one.close()
            else:
                one.sendall(sent[at : at + step])
            at += step
            job.stop = chance.randint(job.done + 1, COUNT)
            status = functions.receive(job)
        assert status in (DONE, CLOSED, CORRUPT), status
    good = 0
    for number, piece in enumerate(pieces(bytes(half.data))):
        if half.table[number]:
            assert CHECKSUM(piece) == half.sums[number]
            good += len(piece)
    assert half.words[0] == good == job.filled_bytes


def send(marks: bytes) -> None:
    """A region whose chunks are there or not, and whose file may be too short, to a reader that may have gone."""
    functions = compiled_chunks.compiled_functions()
    assert functions is not None
    half, chance, data = Half(), random.Random(marks), bytes(range(SIZE))
    for number, piece in enumerate(pieces(data)):
        half.table[number] = marks[number] & 1 if number < len(marks) else 1
        half.sums[number] = CHECKSUM(piece)
    file = os.memfd_create("half")
    one, other = socket.socketpair()
    try:
        os.write(file, data[: chance.choice((SIZE, SIZE, SIZE - 3, CHUNK, 0))])
        one.setblocking(False)
        if chance.random() < 0.1:
            other.close()
        sending = SendJob(chunks=half.at, file=file, connection=one.fileno(), idle_ms=0, patience_ms=0)
        status = functions.send(sending)
        assert status in (DONE, TIMED_OUT, CLOSED) or status < 0
        one.close()
        found = b"" if other.fileno() < 0 else other.recv(1 << 16)
        assert framed(data).startswith(found)
        assert sending.done <= COUNT
    finally:
        os.close(file)
        one.close()
        other.close()


if __name__ == "__main__":
    compiled_chunks.LIBRARY = Path(sys.argv[1])
    sizes = (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 1 << 31, 0xFFFFFFFF)
    seeds = [framed(bytes(range(SIZE)))] + [Frame(size, 0).pack() + bytes(CHUNK) for size in sizes]
    fuzz(st.binary(max_size=300), receive, seeds)
    fuzz(st.binary(max_size=COUNT), send, [bytes(COUNT), b"\1" * COUNT])
