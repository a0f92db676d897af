"""A chain's hop without anything of ours: bytes from one socket into memory, and from there to the next socket.

``python -m benchmarks.cluster.bare_relay SIZE LISTEN|- TARGET|-``, run in a node. It prints a line when it listens, and
connects and begins when a line comes; then it prints when it had all bytes and the CPU time that they took.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import time

_PIECE_BYTES = 256 << 10


def main() -> int:
    size, listen, target = int(sys.argv[1]), *map(_address, sys.argv[2:4])
    descriptor = os.memfd_create("relay")
    os.ftruncate(descriptor, size)
    memory = memoryview(mmap.mmap(descriptor, size))
    for at in range(0, size, mmap.PAGESIZE):  # the pages exist before the clock begins
        memory[at] = 1
    listener = socket.create_server(listen) if listen else None
    print("ready", flush=True)
    sys.stdin.readline()
    onward = socket.create_connection(target) if target else None
    before = listener.accept()[0] if listener else None
    print("connected", flush=True)
    sys.stdin.readline()
    at, first_s = 0, 0.0
    began_s = time.process_time()
    while at < size:
        stop = min(at + _PIECE_BYTES, size)
        while before and at < stop:
            count = before.recv_into(memory[at:stop], 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError("the node before this one has ended")
            first_s = first_s or time.monotonic()
            at += count
        sent = stop - min(_PIECE_BYTES, size - (stop - 1) // _PIECE_BYTES * _PIECE_BYTES, stop)
        while onward and sent < stop:
            sent += os.sendfile(onward.fileno(), descriptor, sent, stop - sent)
        at = stop
    ended_s, cpu_s = time.monotonic(), time.process_time() - began_s
    print(json.dumps({"first_s": first_s, "ended_s": ended_s, "cpu_s": cpu_s}), flush=True)
    sys.stdin.readline()  # the connections stay until all have ended
    return 0


def _address(text: str) -> tuple[str, int] | None:
    host, _, port = text.rpartition(":")
    return (host, int(port)) if host else None


if __name__ == "__main__":
    sys.exit(main())
