"""A small object server: GET and HEAD of files with ranges, ETag and If-Match, sent by sendfile.

It replaces nginx where that is not installed, and can add latency, which nginx cannot do by itself. Like nginx it
follows symbolic links below its root, wherever they lead; a `..` in a URL never leaves the root.
`python benchmarks/ranged_server.py ROOT [--rate BYTES] [--latency S] [--cert PEM] [--log FILE]`
prints its port.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import ssl
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

_ERROR_BODY = b'<?xml version="1.0"?><Error><Code>%s</Code><Message>%s</Message></Error>'
_PACED_SLICE_BYTES = 256 << 10
_TLS_SLICE_BYTES = 1 << 20
_SENDFILE_BYTES = 1 << 30


class RangedServer(ThreadingHTTPServer):
    """A server of the files below ``root`` on a free port of 127.0.0.1, with a thread per connection.

    ``rate`` limits the bytes per second of each connection, and ``latency_s`` passes before each answer. ``cert`` is a
    PEM file for TLS, with its key beside it as ``.key``. For each answer, a line is written to the descriptor ``log``:
    the connection's port at the client, and the bytes of the body.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        root: Path,
        rate: float | None = None,
        latency_s: float = 0.0,
        cert: Path | None = None,
        log: int | None = None,
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root.resolve()
        self.rate = rate
        self.latency_s = latency_s
        self.log = log
        self.tls: ssl.SSLContext | None = None
        if cert:
            self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls.load_cert_chain(cert, cert.with_suffix(".key"))

    def finish_request(self, request: Any, client_address: Any) -> None:
        # The handshake is in the connection's own thread. In accept() it would block all other connections.
        if self.tls:
            request = self.tls.wrap_socket(request, server_side=True)
        _Handler(request, client_address, self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that disconnects is no error of the server
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RangedServer
    disable_nagle_algorithm = True

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        time.sleep(self.server.latency_s)
        # A leading "/" keeps ".." within the root. Links are followed: they are part of the root.
        path = self.server.root / posixpath.normpath("/" + unquote(urlsplit(self.path).path)).lstrip("/")
        if not path.is_file():
            return self._error(404, b"NoSuchKey", body)
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            etag = f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
            if self.headers.get("If-Match", etag) not in (etag, "*"):
                return self._error(412, b"PreconditionFailed", body)
            try:
                wanted = parse_range(self.headers.get("Range"), status.st_size)
            except ValueError:
                return self._error(416, b"InvalidRange", body, ("Content-Range", f"bytes */{status.st_size}"))
            start, stop = wanted or (0, status.st_size)
            self.send_response(206 if wanted else 200)
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{status.st_size}")
            self.send_header("Content-Length", str(stop - start))
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", etag)
            self.send_header("Last-Modified", self.date_time_string(int(status.st_mtime)))
            self.end_headers()
            if body:
                self._send(file, start, stop)
                if self.server.log is not None:
                    os.write(self.server.log, f"{self.client_address[1]} {stop - start}\n".encode())
        return None

    def _error(self, status: int, code: bytes, body: bool, *headers: tuple[str, str]) -> None:
        text = _ERROR_BODY % (code, code)
        self.send_response(status)
        for name, value in (*headers, ("Content-Type", "application/xml"), ("Content-Length", str(len(text)))):
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(text)

    def _send(self, file: BinaryIO, start: int, stop: int) -> None:
        slice_bytes = (
            _PACED_SLICE_BYTES if self.server.rate else _TLS_SLICE_BYTES if self.server.tls else _SENDFILE_BYTES
        )
        began, first = time.monotonic(), start
        while start < stop:
            count = min(slice_bytes, stop - start)
            if self.server.tls:
                self.connection.sendall(os.pread(file.fileno(), count, start))
            else:
                count = os.sendfile(self.connection.fileno(), file.fileno(), start, count)
            start += count
            if self.server.rate:
                time.sleep(max(0.0, began + (start - first) / self.server.rate - time.monotonic()))

    def log_message(self, format: str, *args: object) -> None:
        pass


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the bytes [start, stop) of a Range header, or None without one. Raises ValueError for an empty range."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header.strip()) if header else None
    if not match or match.groups() == ("", ""):  # an unknown unit or form must be ignored (RFC 9110 §14.2)
        return None
    first, last = match.groups()
    start = int(first) if first else max(0, size - int(last))
    stop = min(size, int(last) + 1) if first and last else size
    if start >= stop:
        raise ValueError(header)
    return start, stop


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--cert", type=Path)
    parser.add_argument("--log", type=Path)
    args = parser.parse_args()
    log = os.open(args.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644) if args.log else None
    server = RangedServer(args.root, args.rate, args.latency, args.cert, log)
    print(server.server_port, flush=True)
    # The parent holds the other end of stdin. When the parent ends, in whatever way, so does this process.
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
