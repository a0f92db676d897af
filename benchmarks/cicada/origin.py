"""An origin with one bandwidth for all its connections, that delays single ranges: a store behind a narrow link."""

from __future__ import annotations

import argparse
import itertools
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from medusa_runtime.errors import MedusaError

from benchmarks.ranged_server import RangedServer, _Handler

_SLICE_BYTES = 128 << 10
_SMALL_BYTES = 1 << 20  # ranges below it are headers and the like
_QUEUE_S = 0.02  # what a link's queue holds: it is not idle because this process was not run for a moment


class LimitedServer(RangedServer):
    """``total_rate`` is in bytes a second; every ``delay_every``-th large range is answered ``delay_s`` late."""

    def __init__(self, root: Path, total_rate: float, delay_every: int = 0, delay_s: float = 0.0) -> None:
        super().__init__(root)
        self.total_rate = total_rate
        self.delay_every = delay_every
        self.delay_s = delay_s
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._ranges = itertools.count(1)

    def finish_request(self, request: object, client_address: object) -> None:
        _Limited(request, client_address, self)  # type: ignore[arg-type]

    def take(self, count: int) -> None:
        """Wait until ``count`` bytes have had their time on the link."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic() - _QUEUE_S) + count / self.total_rate
            wait_s = self._free_at - time.monotonic()
        time.sleep(max(wait_s, 0.0))

    def is_late(self) -> bool:
        return self.delay_every > 0 and next(self._ranges) % self.delay_every == 0


class _Limited(_Handler):
    server: LimitedServer

    def _send(self, file: BinaryIO, start: int, stop: int) -> None:
        if stop - start >= _SMALL_BYTES and self.server.is_late() and self._left(self.server.delay_s):
            self.close_connection = True
            return
        while start < stop:
            count = min(_SLICE_BYTES, stop - start)
            self.server.take(count)
            start += os.sendfile(self.connection.fileno(), file.fileno(), start, count)

    def _left(self, within_s: float) -> bool:
        """Return whether the client closes the connection meanwhile; servers notice, and send nothing then."""
        deadline = time.monotonic() + within_s
        while (rest_s := deadline - time.monotonic()) > 0:
            if select.select([self.connection], [], [], rest_s)[0]:
                if not self.connection.recv(1, socket.MSG_PEEK):
                    return True
                time.sleep(rest_s)  # a request that was sent behind this one
        return False


@contextmanager
def serving(root: Path, total_rate: float, delay_every: int = 0, delay_s: float = 0.0) -> Iterator[str]:
    """The address of such a server, in a process of its own that ends with the block."""
    command = [sys.executable, "-m", "benchmarks.cicada.origin", str(root), str(total_rate)]
    command += [str(delay_every), str(delay_s)]
    cwd = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        try:
            port = process.stdout.readline().strip()
            if not port:
                raise MedusaError("the origin did not start; its message is above")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("rate", type=float)
    parser.add_argument("delay_every", type=int)
    parser.add_argument("delay_s", type=float)
    args = parser.parse_args()
    server = LimitedServer(args.root, args.rate, args.delay_every, args.delay_s)
    print(server.server_port, flush=True)
    # The starter holds our stdin: when it is gone, however it went, we go.
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
