"""A connection between two workers for one class of messages, over TCP.

With the cluster's certificates it is encrypted by mutual TLS. Activations, keys and values, and weights never share a
connection, so none waits behind another. The owner's reader thread always drains a channel. Otherwise two workers that
wait to send to each other would wait for ever.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from medusa_runtime.errors import EngineError, MedusaError, from_code
from medusa_runtime.process import hang_up
from medusa_runtime.process_limits import as_limit_error
from medusa_runtime.storage.peer_access import PeerAccess

from .emulated_link import EmulatedLink
from .handshake import is_answer, make_answer, make_challenge, make_greeting, read_greeting
from .message import HEADER_BYTES, LARGEST_BYTES, LARGEST_GREETING_BYTES, Kind, Message, json_message, parse_header
from .tunnel import StoreListener, connect_through_store, is_store_place

if TYPE_CHECKING:
    import ssl

    from .encryption import Encryption

logger = logging.getLogger(__name__)

# Bytes unacknowledged for so long mean that the other node is gone. A shorter time breaks connections on a full link.
_USER_TIMEOUT_MS = 10_000
_GREETING_S = 5.0  # for a whole handshake
_MOST_STRANGERS = 64  # connections before the end of their handshake; one more closes the oldest
_PAUSE_S = 0.05  # before the next attempt to accept, when this process has no descriptors left
_PIECE_BYTES = 64 << 10
_MOST_WAITING_BYTES = 8 << 20  # of what can be made again when there is room
_MOST_PIECES = 64  # for one system call; the kernel takes 1024
_PRIORITY, _TOS = 6, 0xB8  # the highest without privileges; expedited forwarding (RFC 3246)
_SO_MAX_PACING_RATE = 47
_UNLIMITED = (1 << 32) - 1


class ConnectionBrokenError(EngineError):
    """Nothing more can be sent on a connection, because it broke or was closed."""


class Channel(Protocol):
    """A connection to one peer. Messages arrive in order, both ways."""

    last_received_at: float  # when something last arrived (time.monotonic)

    def send(self, message: Message) -> None:
        """Queue a message, without waiting for the network. Raises ConnectionBrokenError."""

    def receive(self) -> Message | None:
        """Wait for the next message. Return None if the peer has closed the channel, or if it is broken."""

    def drain(self) -> None:
        """Wait while much of what was sent has not left. Raises ConnectionBrokenError."""

    def pace(self, bytes_per_s: float | None) -> None:
        """Send at most so many bytes a second from now on. None: no limit."""

    def close(self) -> None:
        """Send nothing more. Can be called twice, and in any thread."""


class TcpChannel:
    """A ``Channel`` over TCP. A thread, started when needed, sends what the socket does not take at once.

    The packets of an ``urgent`` channel go first on this node (SO_PRIORITY), and are marked for the network (IP_TOS).
    ``link`` is an emulated wire that the messages take. ``encryption`` is the connection's TLS session, if it has one.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        urgent: bool,
        link: EmulatedLink | None = None,
        encryption: Encryption | None = None,
    ) -> None:
        connection.settimeout(None)
        if connection.family != socket.AF_UNIX:  # as it is through a store
            _set_options(connection, urgent=urgent)
        self._socket = connection
        self._link = link
        self._encryption = encryption
        self._receive_into = connection.recv_into if encryption is None else encryption.receive_into
        self._waiting: deque[memoryview] = deque()
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None
        self._broken = self._closed = False
        self._deadline: float | None = None  # for the present message of a handshake
        self.last_received_at = time.monotonic()
        self.sent_bytes = 0

    def send(self, message: Message) -> None:
        pieces = [memoryview(message.header()), memoryview(message.body).cast("B")]
        with self._changed:
            if self._broken or self._closed:
                raise ConnectionBrokenError("the connection to another worker of the group is broken")
            self.sent_bytes += sum(map(len, pieces))
            if self._encryption is not None:
                pieces = self._encryption.seal(*pieces)
            if not self._waiting and self._link is None:
                pieces = self._send_now(pieces)
            self._waiting.extend(piece for piece in pieces if len(piece))
            if self._waiting:
                if self._writer is None:
                    self._writer = threading.Thread(target=self._write, name="group-write", daemon=True)
                    self._writer.start()
                self._changed.notify()

    def _send_now(self, pieces: list[memoryview]) -> list[memoryview]:
        """Send what the socket takes without waiting, and return the rest. Raises ConnectionBrokenError."""
        try:
            sent = self._socket.sendmsg(pieces[:_MOST_PIECES], (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return pieces
        except OSError as error:
            self._broken = True
            raise ConnectionBrokenError(f"the connection to another worker of the group broke: {error}") from None
        while pieces and sent >= len(pieces[0]):
            sent -= len(pieces.pop(0))
        if sent:
            pieces[0] = pieces[0][sent:]
        return pieces

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                piece = self._waiting[0]
            part = piece[:_PIECE_BYTES]
            try:
                if self._link is not None:
                    self._link.take(len(part))
                self._socket.sendall(part)
            except OSError:
                with self._changed:
                    self._broken = True
                    self._waiting.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                if self._waiting:
                    self._waiting[0] = piece[len(part) :]
                    if not len(self._waiting[0]):
                        self._waiting.popleft()
                        self._changed.notify_all()

    def receive(self) -> Message | None:
        return self._receive(LARGEST_BYTES)

    @property
    def refusal(self) -> str | None:
        """The reason that the peer gave for ending the encrypted connection, or None."""
        return None if self._encryption is None else self._encryption.refusal

    def send_handshake(self, message: Message) -> None:
        """Send a message of the handshake, and wait until it is sent."""
        data = memoryview(message.header() + bytes(message.body))
        for piece in [data] if self._encryption is None else self._encryption.seal(data):
            self._socket.sendall(piece)

    def receive_handshake(self, deadline: float) -> Message | None:
        """Receive a message of the handshake, which must be small, because the peer is not trusted yet."""
        self._deadline = deadline
        message = self._receive(LARGEST_GREETING_BYTES)
        self._deadline = None
        self._socket.settimeout(None)
        return message

    def _receive(self, most_bytes: int) -> Message | None:
        head = self._read_exactly(HEADER_BYTES)
        if head is None:
            return None
        message, size_bytes = parse_header(head, most_bytes)
        if not size_bytes:
            return message
        body = self._read_exactly(size_bytes)
        return None if body is None else message._replace(body=body)

    def _read_exactly(self, count: int) -> bytearray | None:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            try:
                if self._deadline is not None:
                    self._socket.settimeout(max(self._deadline - time.monotonic(), 0.0))
                received = self._receive_into(view)
            except OSError:
                return None
            if not received:
                return None
            self.last_received_at = time.monotonic()
            view = view[received:]
        return data

    def drain(self) -> None:
        with self._changed:
            while sum(map(len, self._waiting)) > _MOST_WAITING_BYTES and not self._broken and not self._closed:
                self._changed.wait()
            if self._broken or self._closed:
                raise ConnectionBrokenError("the connection to another worker of the group is broken")

    def pace(self, bytes_per_s: float | None) -> None:
        rate = _UNLIMITED if bytes_per_s is None else max(int(bytes_per_s), 1)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, min(rate, _UNLIMITED))

    def flush(self, timeout_s: float) -> None:
        """Wait until everything is handed to the network, for at most ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while self._waiting and not self._broken and time.monotonic() < deadline:
            time.sleep(0.005)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        hang_up(self._socket)
        self._socket.close()


def _set_options(connection: socket.socket, *, urgent: bool) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
    if urgent:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _PRIORITY)
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _TOS)
        elif connection.family == socket.AF_INET6:
            connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, _TOS)


class Greeting(NamedTuple):
    """A worker's greeting, the first message from it, and the channel on which it came."""

    rank: int
    purpose: str  # steps, hidden, blocks
    values: dict[str, Any]
    channel: TcpChannel


class Listener:
    """A listener for connections of the group's workers. It closes all connections that do not know the group's token.

    ``host`` may also be a place in a store, which has no port. With certificates in ``access``, workers have to speak
    TLS, with a certificate of the same CA. ``accept`` is called with each worker's greeting.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        group: int,
        access: PeerAccess,
        accept: Callable[[Greeting], None],
        link: EmulatedLink | None,
    ) -> None:
        self._group = group
        self._token = access.token
        self._context = access.server_context()
        self._accept = accept
        self._link = link
        self._closed = self._refused = False
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}
        self._socket = StoreListener(host) if is_store_place(host) else _server(host, port)
        self.port = port if isinstance(self._socket, StoreListener) else int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, name="group-accept", daemon=True).start()

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if not self._closed:
                    time.sleep(_PAUSE_S)
                continue
            with self._lock:
                self._strangers[connection] = None
                oldest = next(iter(self._strangers)) if len(self._strangers) > _MOST_STRANGERS else None
                if oldest is not None:
                    del self._strangers[oldest]
                    hang_up(oldest)
            try:
                threading.Thread(target=self._greet, args=(connection,), name="group-greet", daemon=True).start()
            except RuntimeError as error:  # there is no room for a thread, now; a peer connects again
                self._refuse(str(as_limit_error(error) or error))
                with self._lock:
                    self._strangers.pop(connection, None)
                hang_up(connection)
                connection.close()
                time.sleep(_PAUSE_S)

    def _greet(self, connection: socket.socket) -> None:
        try:
            deadline = time.monotonic() + _GREETING_S
            encryption = None
            if self._context is not None:
                encryption = _accept_encryption(connection, self._context, self._group, deadline)
            channel = TcpChannel(connection, urgent=True, link=self._link, encryption=encryption)
            challenge = make_challenge(self._group)
            channel.send_handshake(challenge)
            message = channel.receive_handshake(deadline)
            values = None if message is None else read_greeting(self._token, challenge, message)
            if message is None or values is None:
                self._refuse("it does not belong to this group")
                channel.close()
                return
            channel.send_handshake(make_answer(self._token, challenge, message))
            with self._lock:
                known = self._strangers.pop(connection, self) is None
                if self._closed or not known:
                    channel.close()
                else:
                    self._accept(Greeting(message.rank, str(values.get("purpose")), values, channel))
        except (MedusaError, OSError) as error:
            self._refuse(str(error))
            connection.close()
        finally:
            with self._lock:
                self._strangers.pop(connection, None)

    def _refuse(self, reason: str) -> None:
        """Log a refused connection, but only the first one, since strangers could fill the log."""
        if not self._refused and not self._closed:
            self._refused = True
            logger.warning("a connection to this worker of a group was refused (others will be silently): %s", reason)

    def close(self) -> None:
        """Accept no more connections. Those that were given to ``accept`` stay open."""
        with self._lock:
            self._closed = True
            for stranger in self._strangers:
                hang_up(stranger)
        if isinstance(self._socket, socket.socket):
            hang_up(self._socket)
        self._socket.close()


def _server(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise EngineError(f"a group's worker cannot listen on {host}:{port}: {error.strerror}") from None


def _connection(address: str) -> socket.socket:
    if is_store_place(address):
        return connect_through_store(address)
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=1.0)


def connect(
    address: str,
    *,
    group: int,
    access: PeerAccess,
    rank: int,
    purpose: str,
    deadline: float,
    stopped: Callable[[], bool] = lambda: False,
    link: EmulatedLink | None = None,
    **values: Any,
) -> TcpChannel:
    """Connect to a worker's listener at ``HOST:PORT`` or at a place in a store. It may not be there yet.

    ``values`` are sent in the greeting. Raises EngineError after ``deadline`` (time.monotonic).
    """
    values = {"purpose": purpose, **values}
    context = access.client_context()
    refusal: object = None  # the reason why the last attempt failed
    while True:
        connection: socket.socket | None = None
        try:
            connection = _connection(address)
            encryption = None if context is None else _encryption(connection, context)
            channel = TcpChannel(connection, urgent=purpose != "blocks", link=link, encryption=encryption)
            _shake_hands(channel, access.token, group, rank, values)
            return channel
        except (OSError, EngineError) as error:
            if connection is not None:
                connection.close()
            if isinstance(error, EngineError):
                refusal = error
            if time.monotonic() > deadline or stopped():
                reason = refusal or (error.strerror if isinstance(error, OSError) else None) or error
                raise EngineError(
                    f"a worker of the group could not be reached at {address} in time: {reason}"
                ) from None
            time.sleep(0.05)


def _encryption(connection: socket.socket, context: ssl.SSLContext) -> Encryption:
    from .encryption import Encryption  # imports ssl, which is needed only with certificates

    return Encryption(connection, context, server=False, deadline=time.monotonic() + _GREETING_S)


def _accept_encryption(connection: socket.socket, context: ssl.SSLContext, group: int, deadline: float) -> Encryption:
    from .encryption import Encryption, refuse_plain

    refuse_plain(connection, group)
    return Encryption(connection, context, server=True, deadline=deadline)


def _shake_hands(channel: TcpChannel, token: str, group: int, rank: int, values: dict[str, Any]) -> None:
    """Carry out the handshake. Raises OSError or EngineError unless both sides know the token."""
    within = time.monotonic() + _GREETING_S
    challenge = channel.receive_handshake(within)
    if challenge is None:
        if channel.refusal is not None:
            raise EngineError(channel.refusal)
        raise ConnectionResetError("it has closed the connection")
    if challenge.kind is Kind.ERROR:  # do not show its text, which is from a stranger
        raise EngineError("it expects TLS: start this node with --tls, or certificates, too")
    greeting = make_greeting(token, challenge, group, rank, values)
    channel.send_handshake(greeting)
    if not is_answer(token, challenge, greeting, channel.receive_handshake(within)):
        raise EngineError("it is of another group, or takes no connections any more")


def error_of(message: Message) -> MedusaError:
    """Return the error in a peer's message."""
    values = message.values()
    return from_code(str(values.get("code")), str(values.get("message")))


def close_with(channel: TcpChannel, group: int, error: MedusaError) -> None:
    """Close a channel, after sending the peer the reason."""
    try:
        channel.send(json_message(Kind.ERROR, group, {"code": error.code, "message": str(error)}))
        channel.flush(1.0)
    except MedusaError:
        pass
    channel.close()


__all__ = [
    "Channel",
    "ConnectionBrokenError",
    "Greeting",
    "Listener",
    "TcpChannel",
    "close_with",
    "connect",
    "error_of",
]
