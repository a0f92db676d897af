"""The process of one sample. It fetches the object with one client, times it, and prints one JSON line.

Other interpreters run it too, since a peer may have an environment of its own. So it uses only the standard library.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import resource
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

MISSING_PACKAGE = 3  # exit status: the peer is not installed in this interpreter

Buffers = Sequence["bytes | memoryview"]
# A client imports what it needs and sets it up, and returns the function that is timed. The latter fetches the object
# and returns its bytes in order.
Client = Callable[["Job"], Callable[[], Buffers]]


@dataclass(frozen=True)
class Job:
    """What to fetch: the object at ``url``/``bucket``/``key``, and how.

    With ``fresh``, it is fetched into memory that has not been touched yet. With ``verify``, the sample has the CRC-32
    of the bytes from ``data_start`` on. With ``beside_imports``, our prefetcher behaves as in `medusa serve`, where
    other processes import modules at the same time.
    """

    url: str
    bucket: str
    key: str
    size_bytes: int
    data_start: int
    ca_file: str | None = None
    threads: int = 2
    fresh: bool = False
    verify: bool = False
    beside_imports: bool = False

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    @property
    def tls(self) -> bool:
        return self.url.startswith("https:")

    @property
    def path(self) -> str:
        return f"/{self.bucket}/{self.key}"


def shared_memory(size_bytes: int, *, touched: bool) -> tuple[int, mmap.mmap]:
    """Return a memfd and a writable mapping of it. With ``touched``, its pages already exist and are mapped."""
    fd = os.memfd_create("bench")
    if touched:
        return fd, touch(fd, size_bytes)
    os.ftruncate(fd, size_bytes)
    return fd, mmap.mmap(fd, size_bytes)


def touch(fd: int, size_bytes: int) -> mmap.mmap:
    """Give a memfd this size, with all its pages in memory. The caller may drop the mapping that is returned."""
    os.ftruncate(fd, size_bytes)
    memory = mmap.mmap(fd, size_bytes)
    with memoryview(memory) as view, view[:: mmap.PAGESIZE] as firsts:
        firsts[:] = bytes(len(firsts))
    return memory


def main(clients: Mapping[str, Client]) -> None:
    """Run the client that the first argument of the command line names, for the job in the second one (JSON)."""
    name, job = sys.argv[1], Job(**json.loads(sys.argv[2]))
    try:
        fetch = clients[name](job)
    except ModuleNotFoundError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(MISSING_PACKAGE)
    gc.collect()
    cpu_before, began = _cpu_s(), time.perf_counter()
    buffers = fetch()
    seconds, cpu = time.perf_counter() - began, _cpu_s() - cpu_before
    crc = _crc(buffers, job.data_start) if job.verify else None
    print(json.dumps({"seconds": seconds, "cpu_s": cpu, "crc": crc}), flush=True)
    # An interpreter with the threads of a peer does not always end by itself.
    os._exit(0)


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _crc(buffers: Buffers, skip: int) -> int:
    crc = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        crc = zlib.crc32(view[min(skip, len(view)) :], crc)
        skip -= min(skip, len(view))
    return crc
