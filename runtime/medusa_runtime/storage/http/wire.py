"""An HTTP/1.1 client for reading ranges: persistent connections, and bodies received straight into given memory.

The standard library's client can do this too. But its import costs 40 ms of CPU time (it imports the email package),
just when another process on the same cores imports torch. Heads are parsed in ``fields.py``.

The server is not trusted: heads, lines and bodies have a largest size, and an answer that arrives more slowly than
``least_bytes_per_s`` is ended, however it is spread over time.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ...process_limits import check_files
from .endpoint import Endpoint
from .fields import FieldError, Head, chunk_size, framing, keeps_open, parse_head

if TYPE_CHECKING:
    import ssl

    from ..compiled_chunks import CompiledChunks, ReceiveJob
    from .proxy import Proxy

_HEAD_BYTES = 64 << 10
_LINE_BYTES = 256  # the longest line before a chunk, which holds its size
_MOST_INTERIM = 8  # interim answers (1xx) before the final one
_LINE_END = b"\r\n"
_CUT = "the connection was closed before the answer's end"
_WAKE_BYTES = 512 << 10  # how much to wait for at a time; the kernel's receive buffer grows to hold twice as much
_UNKNOWN_AUTHORITY = (18, 19, 20, 21)  # OpenSSL's verify codes: self-signed, or by an issuer that is not known here
_CONNECT_S = 5.0  # for each address; the kernel asks three times meanwhile (after 0, 1 and 3 s)
_UNANSWERED = 3  # how many of a host's addresses may be silent until the time is over
_MOMENT_S = 0.25  # bytes that have come are handed on after this time, for others may wait for them


class WireError(Exception):
    """The connection broke, or what came is not HTTP. ``refused`` is True if no connection could be made at all."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class StalledError(WireError):
    """Nothing came within the connection's timeout. Something may still come, so ``receive`` may be called again."""


class Response(NamedTuple):
    """A response's head; header names are in lower case. ``length`` is None when the head does not state it."""

    status: int
    headers: dict[str, str]
    length: int | None


class _Pace:
    """Ends an answer that is too slow: in each ``window_s`` of waiting, it must come at ``least_bytes_per_s``."""

    def __init__(self, window_s: float, least_bytes_per_s: float) -> None:
        self._window_s = window_s
        self._least = least_bytes_per_s
        self._waited_s = 0.0
        self._bytes = 0

    def add(self, count: int, waited_s: float) -> None:
        """Count bytes and the time that was spent waiting for them. Raises WireError if they are too few."""
        self._bytes += count
        self._waited_s += waited_s
        if self._waited_s >= self._window_s:
            if self._bytes < self._least * self._waited_s:
                raise WireError(f"only {self._bytes} bytes came in {self._waited_s:.0f} s")
            self._waited_s, self._bytes = 0.0, 0


class Connection:
    """One connection to a server, perhaps through a proxy.

    Close it after a WireError, or if a body was not read to its end.

    ``timeout_s`` limits each silence and the time for a head, and is the time over which ``least_bytes_per_s`` is
    measured. ``context`` is the TLS context; by default, one that trusts the system's certificates.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        timeout_s: float,
        *,
        least_bytes_per_s: float = 0.0,
        proxy: Proxy | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._least_bytes_per_s = least_bytes_per_s
        self._proxy = None if endpoint.tls else proxy  # in a tunnel, requests look as they do without a proxy
        self._left = memoryview(b"")  # bytes of the body that were received together with the head
        self._socket = _connect(endpoint, timeout_s, proxy, context)
        self._fill: Callable[[memoryview], int] = self._decrypt if endpoint.tls else self._receive_all
        self._pace = _Pace(timeout_s, least_bytes_per_s)
        self._to_read: int | None = 0
        self._silence_s = timeout_s
        self._wake_bytes = 1  # how many bytes must have come before the kernel wakes a reader
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._chunked = False
        self._keep = True
        self.interrupted = False

    @property
    def peer_address(self) -> str:
        """The address that the host's name led to, or that of the proxy; empty if the connection has broken."""
        try:
            return str(self._socket.getpeername()[0])
        except OSError:
            return ""

    @property
    def reusable(self) -> bool:
        return self._keep and self._to_read == 0 and not self._chunked and not self._left

    def request(self, target: str, headers: Mapping[str, str]) -> Response:
        """Send a GET and receive the head of the answer. Interim answers (1xx) are skipped. Raises WireError."""
        if self._proxy:
            target = f"http://{self.endpoint.authority}{target}"
            if self._proxy.authorization:
                headers = {**headers, "Proxy-Authorization": self._proxy.authorization}
        lines = [f"GET {target} HTTP/1.1", f"Host: {self.endpoint.authority}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._pace = _Pace(self._timeout_s, self._least_bytes_per_s)
        try:
            self._wake_at(1)
            self._socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
            for _ in range(_MOST_INTERIM):
                head, rest = _receive_head(self._socket, bytes(self._left), self._timeout_s)
                self._left = memoryview(rest)
                if head.status >= 200:
                    return self._begin(head)
                if head.status == 101:
                    raise WireError("the server changes to another protocol, which was not asked for")
        except OSError as error:
            raise WireError(_reason(error)) from None
        except FieldError as error:
            raise WireError(str(error)) from None
        raise WireError(f"expected an answer, found {_MOST_INTERIM} that announce one (1xx)")

    def _begin(self, head: Head) -> Response:
        length, self._chunked = framing(head)
        self._keep = keeps_open(head)
        self._to_read = length
        return Response(head.status, head.fields, length)

    def receive(self, buffer: memoryview) -> int:
        """Receive some bytes of a body of known length straight into ``buffer``, and return how many; 0 at its end."""
        assert self._to_read is not None
        wanted = min(len(buffer), self._to_read)
        if not wanted:
            return 0
        if self._left:
            count = min(len(self._left), wanted)
            buffer[:count] = self._left[:count]
            self._left = self._left[count:]
        else:
            count = self._count_received(lambda: self._fill(buffer[:wanted]))
        self._to_read -= count
        return count

    def receive_all(self, buffers: list[memoryview]) -> int:
        """Receive a body of known length into the buffers, one after the other, and return the number of bytes.

        The thread does not wake for each segment, which took half of the CPU time at 50 MB/s, but only when all bytes
        or many are there. After a silence, those that have come are returned.
        """
        assert self._to_read is not None
        wanted = sum(map(len, buffers))
        if self._left or self.endpoint.tls or wanted > self._to_read:
            return self.receive(buffers[0])

        def take() -> int:
            self._wake_at(min(wanted, _WAKE_BYTES))
            self._readable.poll(self._silence_s * 1000)
            return self._socket.recvmsg_into(buffers, 0, socket.MSG_DONTWAIT)[0]

        count = self._count_received(take)
        self._to_read -= count
        return count

    @property
    def plain(self) -> bool:
        """Whether the rest of the body can be read from the socket directly: without TLS, and with nothing buffered."""
        return not self._left and not self.endpoint.tls

    def receive_chunks(self, chunks: CompiledChunks, job: ReceiveJob) -> int:
        """Receive chunks of a ``plain`` body of known length into a region. Returns a status of ``compiled_chunks``."""
        assert self._to_read is not None
        began, before = time.monotonic(), job.wire_bytes
        job.connection, job.silence_ms = self._socket.fileno(), int(self._silence_s * 1000)
        job.wake_bytes = self._wake_bytes
        status = chunks.receive(job)
        self._wake_bytes = job.wake_bytes
        count = job.wire_bytes - before
        self._to_read -= count
        if count:  # the caller judges a silence
            self._pace.add(count, time.monotonic() - began)
        return status

    def _count_received(self, take: Callable[[], int]) -> int:
        """Receive with ``take``, and count the bytes in the connection's pace. Raises StalledError after a silence."""
        began = time.monotonic()
        try:
            count = take()
        except (TimeoutError, BlockingIOError) as error:
            raise StalledError(_reason(error)) from None
        except OSError as error:
            raise WireError(_reason(error)) from None
        if not count:
            raise WireError(f"the connection was closed {self._to_read} bytes before the answer's end")
        self._pace.add(count, time.monotonic() - began)
        return count

    def _wake_at(self, size_bytes: int) -> None:
        if size_bytes != self._wake_bytes:
            with suppress(OSError):  # some sandboxes do not know this option; then the thread wakes more often
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
            self._wake_bytes = size_bytes

    def _receive_all(self, buffer: memoryview) -> int:
        """Receive what comes within a moment, or much of it: each return to the interpreter takes its lock."""
        until = time.monotonic() + self._silence_s
        self._wake_at(min(len(buffer), _WAKE_BYTES))
        while True:
            self._readable.poll(_MOMENT_S * 1000)
            try:
                return self._socket.recv_into(buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise

    def _decrypt(self, buffer: memoryview) -> int:
        """Receive until ``buffer`` is full, or for a moment: with TLS, each call gives one record of 16 KB."""
        receive, wanted = self._socket.recv_into, len(buffer)
        filled = receive(buffer)
        if filled in (0, wanted):
            return filled
        until = time.monotonic() + _MOMENT_S
        self._socket.settimeout(_MOMENT_S)
        try:
            while filled < wanted and (count := receive(buffer[filled:])):
                filled += count
                if time.monotonic() > until:
                    break
        except TimeoutError:
            pass  # the bytes that have come are returned
        finally:
            self._socket.settimeout(self._silence_s)
        return filled

    def body(self, most: int) -> bytes:
        """Receive a small body in any form, at most ``most`` bytes. If it is longer, the connection is not reusable."""
        if self._to_read is not None:
            buffer = bytearray(min(self._to_read, most))
            filled = 0
            while filled < len(buffer):
                filled += self.receive(memoryview(buffer)[filled:])
            return bytes(buffer)
        data = bytearray()
        if self._chunked:
            try:
                ended = self._chunks(data, most)
            except FieldError as error:
                raise WireError(str(error)) from None
            self._chunked = False
        else:
            ended = False
            while len(data) < most and (more := self._some(most - len(data))):
                data += more
        self._keep = self._keep and ended
        self._to_read = 0
        return bytes(data)

    def _chunks(self, data: bytearray, most: int) -> bool:
        """Append chunks to ``data`` until it has ``most`` bytes. Return whether the body has ended."""
        while size := chunk_size(self._line()):
            wanted = min(size, most - len(data))
            end = len(data) + wanted
            while len(data) < end:
                data += self._more(end - len(data))
            if wanted < size:
                return False
            if self._line():
                raise WireError("expected a line's end behind a chunk")
        trailers = 0
        while line := self._line():
            trailers += len(line)
            if trailers > _HEAD_BYTES:
                raise WireError(f"expected at most {_HEAD_BYTES} bytes of trailers")
        return True

    def _line(self) -> bytes:
        while True:
            line = bytes(self._left[:_LINE_BYTES])
            if (end := line.find(_LINE_END)) >= 0:
                self._left = self._left[end + 2 :]
                return line[:end]
            if len(line) == _LINE_BYTES:
                raise WireError(f"expected lines of less than {_LINE_BYTES} bytes in a chunked body")
            received = self._received()
            if not received:
                raise WireError(_CUT)
            self._left = memoryview(line + received)

    def _more(self, most: int) -> bytes:
        data = self._some(most)
        if not data:
            raise WireError(_CUT)
        return data

    def _some(self, most: int) -> bytes:
        """Receive some bytes, at most ``most``; none if the connection has ended."""
        if not self._left:
            self._left = memoryview(self._received())
        data, self._left = bytes(self._left[:most]), self._left[most:]
        return data

    def _received(self) -> bytes:
        began = time.monotonic()
        try:
            data = self._socket.recv(_HEAD_BYTES)
        except OSError as error:
            raise WireError(_reason(error)) from None
        self._pace.add(len(data), time.monotonic() - began)
        return data

    def limit_silence(self, timeout_s: float) -> None:
        """Set how long ``receive`` waits while nothing comes, in place of the connection's ``timeout_s``."""
        self._silence_s = timeout_s
        if self.endpoint.tls:
            self._socket.settimeout(timeout_s)
        else:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s))

    def give_up_after(self, unanswered_s: float) -> None:
        """End the connection if the other machine acknowledges nothing for this long (TCP_USER_TIMEOUT)."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(unanswered_s * 1000))

    def interrupt(self) -> None:
        """End the connection from another thread. The thread that reads from it gets a WireError at once."""
        self.interrupted, self._keep = True, False
        with suppress(OSError):
            # Shut down the plain socket: the TLS socket's own method would drop its state while the reader uses it.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._keep = False
        self._socket.close()


def _receive_head(connection: socket.socket, received: bytes, timeout_s: float) -> tuple[Head, bytes]:
    """Receive a head, and return it with the bytes that came after it. ``received`` has already come."""
    head, searched = bytearray(received), 0
    until = time.monotonic() + timeout_s
    while (end := head.find(b"\r\n\r\n", max(searched - 3, 0))) < 0:
        if len(head) > _HEAD_BYTES:
            raise WireError(f"a response head of more than {_HEAD_BYTES} bytes")
        if b"\n\n" in head[max(searched - 1, 0) :]:
            raise WireError("expected lines that end in CR LF, found line feeds alone")
        if time.monotonic() > until:
            raise WireError(f"the answer's head did not come within {timeout_s:g} s")
        searched = len(head)
        data = connection.recv(_HEAD_BYTES)
        if not data:
            raise WireError("the connection was closed before an answer came")
        head += data
    return parse_head(bytes(head[:end])), bytes(head[end + 4 :])


def _reach(host: str | bytes, port: int, timeout_s: float) -> socket.socket:
    """Connect to the first of a host's addresses that answers within some seconds. Raises OSError if none does.

    All of them together get a few times as long, because a name may have thousands.
    """
    error = OSError("its name has no address")
    until = time.monotonic() + _UNANSWERED * timeout_s
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(min(timeout_s, _CONNECT_S, left_s))
            connection.connect(address)
        except OSError as failure:
            error = failure
            connection.close()
        else:
            connection.settimeout(timeout_s)  # not what was left of the time for all addresses
            return connection
    raise error


def _connect(
    endpoint: Endpoint, timeout_s: float, proxy: Proxy | None, context: ssl.SSLContext | None
) -> socket.socket:
    reached = proxy.endpoint if proxy else endpoint
    try:
        # Pass bytes where possible: for a str, Python imports its IDNA tables (5 ms).
        host: str | bytes = reached.host.encode() if reached.host.isascii() else reached.host
        connection = _reach(host, reached.port, timeout_s)
    except OSError as error:
        check_files()  # no store is asked again for want of them, and without any a name cannot be looked up
        through = f"the proxy of {proxy.variable}, {reached.authority}: " if proxy else ""
        raise WireError(f"{through}{_reason(error)}", refused=True) from None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not endpoint.tls:
        # From here on, the kernel enforces the timeouts: Python's own would cost a poll before each call.
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_s))
        return connection
    import ssl  # 10 ms, and only needed for https

    try:
        if proxy:
            _tunnel(connection, endpoint, proxy, timeout_s)
        return (context or tls_context()).wrap_socket(connection, server_hostname=endpoint.host)
    except WireError:
        connection.close()
        raise
    except ssl.SSLCertVerificationError as error:
        connection.close()
        hint = _authority_hint() if context is None and error.verify_code in _UNKNOWN_AUTHORITY else ""
        raise WireError(f"its certificate cannot be trusted: {error.verify_message}{hint}", refused=True) from None
    except (ssl.SSLError, OSError, ValueError) as error:  # ValueError: a host that no certificate can name
        connection.close()
        reason = _reason(error) if isinstance(error, OSError) else "its name cannot be in a certificate"
        raise WireError(f"no TLS connection: {reason}", refused=True) from None


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def _tunnel(connection: socket.socket, endpoint: Endpoint, proxy: Proxy, timeout_s: float) -> None:
    """Ask the proxy for a tunnel to the endpoint (RFC 9110 §9.3.6)."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    lines = [f"CONNECT {host}:{endpoint.port} HTTP/1.1", f"Host: {host}:{endpoint.port}"]
    if proxy.authorization:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    where = f"the proxy of {proxy.variable}, {proxy.endpoint.authority}"
    connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
    try:
        head, rest = _receive_head(connection, b"", timeout_s)
    except (FieldError, WireError) as error:
        raise WireError(f"{where}: {error}", refused=True) from None
    if not 200 <= head.status < 300 or rest:
        hint = f"; expected user and password in {proxy.variable}" if head.status == 407 else ""
        raise WireError(f"{where}: expected a tunnel, found {head.status}{hint}", refused=True)


def _authority_hint() -> str:
    """Return, for a message, where the certificate of a private CA belongs. Python ignores a file that is not there."""
    file = os.environ.get("SSL_CERT_FILE")
    found = "" if file is None else f", which is {file!r}{'' if os.access(file, os.R_OK) else ' and cannot be read'}"
    return f"; the certificate of a CA of your own belongs in the file that SSL_CERT_FILE names{found}"


_contexts: list[ssl.SSLContext] = []


def tls_context() -> ssl.SSLContext:
    """Return the TLS context that all connections share, since reading the certificates takes 20 ms.

    SSL_CERT_FILE and SSL_CERT_DIR are honoured.
    """
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
