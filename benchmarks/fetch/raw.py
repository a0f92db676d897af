"""Bare sockets: `recv_into` shared memory, with one connection per thread. They are the bound for our prefetcher."""

from __future__ import annotations

import ctypes
import mmap
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.fetch.client import Buffers, Client, Job, main, shared_memory

_MADV_POPULATE_WRITE = 23
_AHEAD_BYTES = 16 << 20


def prepare(job: Job) -> Callable[[], Buffers]:
    """Prepare a fetch in which each thread receives one long range.

    The pages already exist or, if the job is ``fresh``, are made by faults in ``recv``.
    """
    _, memory = shared_memory(job.size_bytes, touched=not job.fresh)
    step = -(-job.size_bytes // job.threads)
    ranges = [(start, min(job.size_bytes, start + step)) for start in range(0, job.size_bytes, step)]

    def fetch() -> Buffers:
        _run([partial(_receive, job, iter([part]), memory) for part in ranges])
        return [memoryview(memory)]

    return fetch


def prepare_populate(job: Job) -> Callable[[], Buffers]:
    """Prepare a fetch into fresh memory. Threads take one range after another; one more thread makes pages ahead."""
    _, memory = shared_memory(job.size_bytes, touched=False)
    cuts = range(0, job.size_bytes, _AHEAD_BYTES)
    turns = _Turns((start, min(job.size_bytes, start + _AHEAD_BYTES)) for start in cuts)

    def fetch() -> Buffers:
        _run([partial(_populate, memory, cuts), *[partial(_receive, job, turns, memory)] * job.threads])
        return [memoryview(memory)]

    return fetch


class _Turns:
    """An iterator that several threads can share."""

    def __init__(self, ranges: Iterator[tuple[int, int]]) -> None:
        self._ranges = ranges
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self

    def __next__(self) -> tuple[int, int]:
        with self._lock:
            return next(self._ranges)


def _populate(memory: mmap.mmap, cuts: range) -> None:
    madvise = ctypes.CDLL(None, use_errno=True).madvise  # mmap.madvise would hold the GIL
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for start in cuts:
        length = min(len(memory), start + cuts.step) - start
        madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)


def _receive(job: Job, ranges: Iterator[tuple[int, int]], memory: mmap.mmap) -> None:
    connection = socket.create_connection((job.host, job.port))
    if job.tls:
        connection = ssl.create_default_context(cafile=job.ca_file).wrap_socket(connection, server_hostname=job.host)
    with connection, memoryview(memory) as view:
        for start, stop in ranges:
            request = f"GET {job.path} HTTP/1.1\r\nHost: {job.host}\r\nRange: bytes={start}-{stop - 1}\r\n\r\n"
            connection.sendall(request.encode())
            head = b""
            while b"\r\n\r\n" not in head:
                head += _some(connection.recv(4096))
            head, _, body = head.partition(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 206"):
                raise ConnectionError(f"the origin answered {head[:40]!r} to a range, expected 206")
            view[start : start + len(body)] = body
            start += len(body)
            while start < stop:
                count = connection.recv_into(view[start:stop])
                if not count:
                    raise ConnectionError("the origin closed the connection in the middle of a range")
                start += count


def _some(data: bytes) -> bytes:
    if not data:
        raise ConnectionError("the origin closed the connection before it answered")
    return data


def _run(tasks: list[Callable[[], None]]) -> None:
    """Run each task in a thread of its own and wait for all. Raises the first error of a task."""
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001  raised again below, in the waiting thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


CLIENTS: dict[str, Client] = {"raw": prepare, "raw-populate": prepare_populate}

if __name__ == "__main__":
    main(CLIENTS)
