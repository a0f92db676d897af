"""Messages on the agent's sockets. Each is a JSON object, with descriptors beside it (SCM_RIGHTS).

The sockets are of type SOCK_SEQPACKET: the kernel keeps a message whole, and together with its descriptors.

    client → agent    hello {version} · region {url, pin, fresh, background, held} +[folder] · keep {url} +[region] ·
                      engine {kind, settings} +[4 descriptors] · drop {url} · status
    agent → client    hello {version, pid} · wait · region {fetched} +[region, demand] · engine {pid} · kept · dropped
                      status {…} · lost {message} · error {code, message}
    agent → zygote    fork                       zygote → agent    forked {pid} +[channel, pidfd] · failed {message}
    agent → engine    take {settings} +[6, and the shards' files]       engine → agent    warm
    spare → agent    ready    agent → spare    fetch {key, connections, layers}, which makes it a prefetcher
    prefetcher → agent    room {bytes} · sealed +[the shards' files] · sources {received_bytes, excluded}
    agent → prefetcher    room · error {code, message}

The files of a local model's shards are one descriptor (see shard_files.py).
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..errors import NodeError, NodeRefusedError
from ..process import receive_descriptors
from ..region.seals import seals_of
from .callers.file_status import MOST_THREADS, file_status

VERSION = 1
LARGEST_BYTES = 1 << 16
MOST_DESCRIPTORS = 8  # from a client
MOST_INTERNAL_DESCRIPTORS = 250  # between the agent and its children; the kernel allows 253 (unix(7))
_NO_LINGER = struct.pack("ii", 0, 0)

Body = dict[str, Any]


class Message(NamedTuple):
    """A received message. Its receiver must close the ``descriptors``."""

    kind: str
    body: Body
    descriptors: list[int]

    def close(self) -> None:
        discard(self.descriptors)
        self.descriptors.clear()


def send(connection: socket.socket, kind: str, body: Body | None = None, descriptors: Sequence[int] = ()) -> None:
    """Send a message. Raises NodeError if it is too long, and OSError if the other side is gone or does not read."""
    data = json.dumps({**(body or {}), "type": kind}, separators=(",", ":")).encode()
    if len(data) > LARGEST_BYTES:
        raise NodeError(f"a {kind} message of {len(data)} bytes is too long; expected at most {LARGEST_BYTES}")
    socket.send_fds(connection, [data], list(descriptors))


def receive(connection: socket.socket, most: int = MOST_DESCRIPTORS, flags: int = 0) -> Message | None:
    """Receive a message with at most ``most`` descriptors; None if the other side is gone.

    ``flags`` are those of recv(2), such as MSG_PEEK. Raises NodeError for a malformed message.
    """
    try:
        # Make room for more descriptors than may come: the kernel would close the others itself, and if one is a socket
        # the sender could make that wait (see ``close_without_linger``).
        data, descriptors, found = receive_descriptors(
            connection, LARGEST_BYTES + 1, MOST_INTERNAL_DESCRIPTORS + 3, flags
        )
    except (ConnectionError, BrokenPipeError):
        return None
    if not data:
        discard(descriptors)
        return None
    try:
        return _parse(data, descriptors, found, most)
    except BaseException:
        discard(descriptors)
        raise


def _parse(data: bytes, descriptors: list[int], flags: int, most: int) -> Message:
    if len(descriptors) > most:
        raise NodeError(f"a message had too many descriptors; expected at most {most}, found {len(descriptors)}")
    if len(data) > LARGEST_BYTES or flags & socket.MSG_TRUNC:
        raise NodeError(f"a message was too long; expected at most {LARGEST_BYTES} bytes")
    if flags & socket.MSG_CTRUNC:
        raise NodeError("a message's descriptors did not all arrive; expected room for more open files")
    try:
        body = json.loads(data.decode())
        if b"\\u" in data:
            json.dumps(body, ensure_ascii=False).encode()  # half of a surrogate pair cannot be logged, opened or sent
    except (ValueError, RecursionError):
        raise NodeError(f"expected a JSON object, found {data[:40]!r}") from None
    if not isinstance(body, dict) or not isinstance(body.get("type"), str):
        raise NodeError(f"expected a JSON object with a type, found {data[:40]!r}")
    return Message(body["type"], body, descriptors)


def text_field(body: Body, name: str) -> str:
    """Return a field that must be a text. Raises NodeError if it is not, or is empty."""
    value = body.get(name)
    if not isinstance(value, str) or not value or "\0" in value:
        raise NodeError(f"{name}: expected text, found {repr(value)[:80]}")
    return value


def flag_field(body: Body, name: str) -> bool:
    """Return a field that must be true or false, or False if it is missing. Raises NodeError for anything else."""
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise NodeError(f"{name}: expected true or false, found {repr(value)[:40]}")
    return value


def close_without_linger(descriptors: Iterable[int]) -> None:
    """Close descriptors, also untrusted ones: never wait until a socket has sent what is left (SO_LINGER)."""
    for descriptor in descriptors:
        with suppress(OSError):  # it is none; to ask for its status could ask a caller's own file system
            untrusted = socket.socket(fileno=descriptor)  # no duplicate: there may be no room for one
            try:
                untrusted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            finally:
                untrusted.detach()
        os.close(descriptor)


def discard(descriptors: Iterable[int]) -> None:
    """Close what was received. A file on a file system of the sender's own (FUSE) is closed when that likes.

    Its process asks the file system (FLUSH), and cannot even be killed until there is an answer. So a thread does it,
    which no other message of a caller needs: folders, sockets, pipes and shared memory are closed by the kernel alone.
    """
    for descriptor in descriptors:
        if not _may_hang(descriptor):
            close_without_linger([descriptor])
        elif threading.active_count() < MOST_THREADS:
            with suppress(RuntimeError):  # no room for a thread: it stays open
                threading.Thread(target=_close, args=(descriptor,), name="discard", daemon=True).start()


def _may_hang(descriptor: int) -> bool:
    try:
        if not stat.S_ISREG(file_status(descriptor).mode):
            return False
        seals_of(descriptor)
    except (NodeRefusedError, OSError):
        return True
    return False


def _close(descriptor: int) -> None:
    with suppress(OSError):
        os.close(descriptor)


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a connection between the agent's own processes."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
