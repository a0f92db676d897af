"""One sample of one client, in a process of its own: fetch the object, time it, print one JSON line.

Runs under other interpreters too (a peer may live in its own environment), so it uses the standard library only.
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
# Imports and sets up, then returns the function that is timed; that one returns the object's bytes in order.
Client = Callable[["Job"], Callable[[], Buffers]]


@dataclass(frozen=True)
class Job:
    """What to fetch: ``url``/``bucket``/``key``. ``fresh`` asks for memory that has not been touched yet.

    ``beside_imports`` makes ours behave as in `medusa serve`, where something else is imported meanwhile.
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
    """A memfd and a writable mapping of it; ``touched`` means that its pages exist and are mapped."""
    fd = os.memfd_create("bench")
    if touched:
        return fd, touch(fd, size_bytes)
    os.ftruncate(fd, size_bytes)
    return fd, mmap.mmap(fd, size_bytes)


def touch(fd: int, size_bytes: int) -> mmap.mmap:
    """Make a memfd this large, with all of its pages in memory; the mapping that did it may be dropped."""
    os.ftruncate(fd, size_bytes)
    memory = mmap.mmap(fd, size_bytes)
    with memoryview(memory) as view, view[:: mmap.PAGESIZE] as firsts:
        firsts[:] = bytes(len(firsts))
    return memory


def main(clients: Mapping[str, Client]) -> None:
    """``argv``: the client's name and the job as JSON."""
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
    # Interpreters full of other people's threads do not always come to an end.
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
