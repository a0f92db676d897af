"""HTTP/1.1 as a reader of ranges needs it: one persistent connection, bodies received straight into given memory.

The standard library's client can do this too, but its import costs 40 ms of CPU (it brings the email package) at the
very moment when another process on the same cores imports torch.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import ssl

_HEAD_BYTES = 64 << 10
_LINE_END = b"\r\n"


class Endpoint(NamedTuple):
    """Where to connect."""

    tls: bool
    host: str
    port: int

    @property
    def authority(self) -> str:
        """The Host header: the port only where it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


class WireError(Exception):
    """The connection broke or what came is no HTTP; ``refused`` when nobody could be reached at all."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Response(NamedTuple):
    """A response's head; header names are in lower case. ``length`` is None when the body says its end itself."""

    status: int
    headers: dict[str, str]
    length: int | None


class Connection:
    """One connection. After a WireError, or a body that was not read to its end, close it."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self.endpoint = endpoint
        self._left = memoryview(b"")  # received behind the head, belongs to the body
        self._socket = _connect(endpoint, timeout_s)
        self._fill: Callable[[memoryview], int] = self._decrypt if endpoint.tls else self._receive_all
        self._to_read: int | None = 0
        self._chunked = False
        self._keep = True
        self.interrupted = False

    @property
    def reusable(self) -> bool:
        return self._keep and self._to_read == 0 and not self._chunked

    def request(self, target: str, headers: Mapping[str, str], method: str = "GET") -> Response:
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self.endpoint.authority}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        try:
            self._socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
            head = self._receive_head()
        except OSError as error:
            raise WireError(_reason(error)) from None
        return self._parse(head, method)

    def _receive_head(self) -> bytes:
        head = bytearray()
        while (end := head.find(b"\r\n\r\n")) < 0:
            if len(head) > _HEAD_BYTES:
                raise WireError(f"a response head of more than {_HEAD_BYTES} bytes")
            data = self._socket.recv(_HEAD_BYTES)
            if not data:
                raise WireError("the connection was closed before an answer came")
            head += data
        self._left = memoryview(bytes(head[end + 4 :]))
        return bytes(head[:end])

    def _parse(self, head: bytes, method: str) -> Response:
        status_line, *lines = head.decode("latin-1").split("\r\n")
        words = status_line.split(None, 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise WireError(f"expected an HTTP/1.1 answer, found {status_line[:60]!r}")
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        status = int(words[1])
        if 100 <= status < 200:
            raise WireError(f"an unexpected answer {status}")
        self._keep = words[0] != "HTTP/1.0" and headers.get("connection", "").lower() != "close"
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        text = headers.get("content-length", "")
        length = int(text) if text.isdigit() and not self._chunked else None
        if method == "HEAD" or status in (204, 304):
            self._chunked, length = False, length or 0
            self._to_read = 0
        else:
            self._to_read = length
        return Response(status, headers, length)

    def receive(self, buffer: memoryview) -> int:
        """Some bytes of a body of known length, straight into ``buffer``; 0 only at its end."""
        assert self._to_read is not None
        wanted = min(len(buffer), self._to_read)
        if not wanted:
            return 0
        if self._left:
            count = min(len(self._left), wanted)
            buffer[:count] = self._left[:count]
            self._left = self._left[count:]
        else:
            try:
                count = self._fill(buffer[:wanted])
            except OSError as error:
                raise WireError(_reason(error)) from None
            if not count:
                raise WireError(f"the connection was closed {self._to_read} bytes before the answer's end")
        self._to_read -= count
        return count

    def _receive_all(self, buffer: memoryview) -> int:
        """One call takes all that is wanted, however it arrives: each return to the interpreter costs its lock."""
        return self._socket.recv_into(buffer, 0, socket.MSG_WAITALL)

    def _decrypt(self, buffer: memoryview) -> int:
        """TLS gives a record of 16 KB at a time, so what is done for each is as little as can be."""
        receive, filled, wanted = self._socket.recv_into, 0, len(buffer)
        while filled < wanted and (count := receive(buffer[filled:])):
            filled += count
        return filled

    def body(self, most: int) -> bytes:
        """A small body of any form, at most ``most`` bytes of it; beyond that the connection is not reusable."""
        if self._to_read is not None and not self._chunked:
            buffer = bytearray(min(self._to_read, most))
            filled = 0
            while filled < len(buffer):
                filled += self.receive(memoryview(buffer)[filled:])
            return bytes(buffer)
        data = self._chunks(most) if self._chunked else self._until_closed(most)
        self._chunked = False
        if len(data) >= most:
            self._keep = False
        self._to_read = 0
        return bytes(data[:most])

    def _until_closed(self, most: int) -> bytearray:
        self._keep = False
        data = bytearray()
        while len(data) < most and (more := self._some()):
            data += more
        return data

    def _chunks(self, most: int) -> bytearray:
        raw, data = bytearray(), bytearray()
        while len(data) < most:
            size = int(self._line(raw).partition(b";")[0] or b"0", 16)
            while len(raw) < size + 2:
                raw += self._more()
            data += raw[:size]
            del raw[: size + 2]
            if not size:
                return data  # trailers are not sent by any store we know; what follows would be one
        return data

    def _line(self, raw: bytearray) -> bytes:
        while (end := raw.find(_LINE_END)) < 0:
            raw += self._more()
        line = bytes(raw[:end])
        del raw[: end + 2]
        return line

    def _more(self) -> bytes:
        data = self._some()
        if not data:
            raise WireError("the connection was closed before the answer's end")
        return data

    def _some(self) -> bytes:
        if self._left:
            data, self._left = bytes(self._left), memoryview(b"")
            return data
        try:
            return self._socket.recv(_HEAD_BYTES)
        except OSError as error:
            raise WireError(_reason(error)) from None

    def interrupt(self) -> None:
        """End it from another thread: whoever reads from it gets a WireError at once."""
        self.interrupted, self._keep = True, False
        with suppress(OSError):
            # Of the plain socket: TLS would take its state from under the one who reads.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._keep = False
        self._socket.close()


def _connect(endpoint: Endpoint, timeout_s: float) -> socket.socket:
    try:
        # As bytes where they can be: for a str Python imports its IDNA tables (5 ms).
        host: str | bytes = endpoint.host.encode() if endpoint.host.isascii() else endpoint.host
        connection = socket.create_connection((host, endpoint.port), timeout_s)  # type: ignore[arg-type]
    except OSError as error:
        raise WireError(_reason(error), refused=True) from None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not endpoint.tls:
        # The kernel keeps the time from here on; Python's own timeouts cost a poll before each call.
        connection.settimeout(None)
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        return connection
    import ssl  # 10 ms, only for https

    try:
        return tls_context().wrap_socket(connection, server_hostname=endpoint.host)
    except ssl.SSLCertVerificationError as error:
        connection.close()
        raise WireError(f"its certificate cannot be trusted: {error.verify_message}", refused=True) from None
    except (ssl.SSLError, OSError) as error:
        connection.close()
        raise WireError(f"no TLS connection: {_reason(error)}", refused=True) from None


_contexts: list[ssl.SSLContext] = []


def tls_context() -> ssl.SSLContext:
    """One for all connections: reading the certificates takes 20 ms. SSL_CERT_FILE and SSL_CERT_DIR are honoured."""
    if not _contexts:
        import ssl

        _contexts.append(ssl.create_default_context())
    return _contexts[0]


def _reason(error: OSError) -> str:
    if isinstance(error, (TimeoutError, BlockingIOError)):
        return "nothing came for too long"
    if isinstance(error, socket.gaierror):
        return "its name is not known (DNS)"
    return error.strerror or type(error).__name__
