"""A hop of a chain without any of our code. It receives bytes from a socket into memory, and sends them to the next.

``python -m benchmarks.cluster.bare_relay SIZE LISTEN|- TARGET|-`` runs in a node. It listens, connects, passes SIZE
bytes on, and prints when the first and the last bytes came, and its CPU time. After each of these steps it prints a
line, and waits for a line on its standard input.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import time

_PIECE_BYTES = 256 << 10
_MEMORY_BYTES = 64 << 20  # used in a circle; more than the sockets' buffers hold, and all of its pages exist


def main() -> int:
    size, before, onward = int(sys.argv[1]), None, None
    descriptor = os.memfd_create("relay")
    os.ftruncate(descriptor, _MEMORY_BYTES)
    memory = memoryview(mmap.mmap(descriptor, _MEMORY_BYTES))
    for page in range(0, _MEMORY_BYTES, mmap.PAGESIZE):
        memory[page] = 1
    listener = None if sys.argv[2] == "-" else socket.create_server(_address(sys.argv[2]))
    _next("listening")
    if sys.argv[3] != "-":
        onward = socket.create_connection(_address(sys.argv[3]))
    if listener is not None:
        before, _ = listener.accept()
    _next("connected")
    first_s, began_s = 0.0, time.process_time()
    for start in range(0, size, _PIECE_BYTES):
        at, stop = start % _MEMORY_BYTES, start % _MEMORY_BYTES + min(_PIECE_BYTES, size - start)
        if before is not None:
            filled = at
            while filled < stop:
                count = before.recv_into(memory[filled:stop], 0, socket.MSG_WAITALL)
                if not count:
                    raise ConnectionResetError("the relay before this one has ended")
                filled += count
            first_s = first_s or time.monotonic()
        while onward is not None and at < stop:
            at += os.sendfile(onward.fileno(), descriptor, at, stop - at)
    cpu_s = time.process_time() - began_s
    # Keep the sockets open until the answer: the next relay may still be reading.
    _next(json.dumps({"first_s": first_s, "ended_s": time.monotonic(), "cpu_s": cpu_s}))
    return 0


def _next(line: str) -> None:
    print(line, flush=True)
    sys.stdin.readline()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


if __name__ == "__main__":
    sys.exit(main())
