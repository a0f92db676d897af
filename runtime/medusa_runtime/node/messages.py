"""What crosses the agent's sockets: one JSON object a message, with descriptors beside it (SCM_RIGHTS). No pickle.

The sockets are SOCK_SEQPACKET: the kernel keeps a message and its descriptors together, and there is no half of one.

    client → agent    hello {version} · region {url, pin, fresh, background} +[folder] · keep {url} +[region] ·
                      engine {kind, settings} +[5 descriptors] · drop {url} · status
    agent → client    hello {version, pid} · wait · region {fetched} +[region, demand] · engine {pid} · kept · dropped
                      status {…} · lost {message} · error {code, message}
    agent → zygote    fork                       zygote → agent    forked {pid} +[channel] · failed {message}
    agent → engine    take {settings} +[7]       engine → agent    warm
    prefetcher → agent    room {bytes} · sealed                    agent → prefetcher    room · error {code, message}
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..errors import NodeError

VERSION = 1
LARGEST_BYTES = 1 << 16
MOST_DESCRIPTORS = 8

Body = dict[str, Any]


class Message(NamedTuple):
    """``descriptors`` belong to whoever received the message."""

    kind: str
    body: Body
    descriptors: list[int]

    def close(self) -> None:
        close_all(self.descriptors)
        self.descriptors.clear()


def send(connection: socket.socket, kind: str, body: Body | None = None, descriptors: Sequence[int] = ()) -> None:
    """Raises NodeError for a message that is too long, OSError when the other side is gone or takes nothing."""
    data = json.dumps({**(body or {}), "type": kind}, separators=(",", ":")).encode()
    if len(data) > LARGEST_BYTES:
        raise NodeError(f"a {kind} message of {len(data)} bytes is too long; expected at most {LARGEST_BYTES}")
    socket.send_fds(connection, [data], list(descriptors))


def receive(connection: socket.socket) -> Message | None:
    """The next message, or None when the other side is gone. Raises NodeError for what is no message of ours."""
    try:
        data, descriptors, flags, _ = socket.recv_fds(
            connection, LARGEST_BYTES + 1, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
    except (ConnectionError, BrokenPipeError):
        return None
    if not data:
        close_all(descriptors)
        return None
    try:
        return _parse(data, descriptors, flags)
    except BaseException:
        close_all(descriptors)
        raise


def _parse(data: bytes, descriptors: list[int], flags: int) -> Message:
    if len(data) > LARGEST_BYTES or flags & socket.MSG_TRUNC:
        raise NodeError(f"a message was too long; expected at most {LARGEST_BYTES} bytes")
    if flags & socket.MSG_CTRUNC:
        raise NodeError(f"a message had too many descriptors; expected at most {MOST_DESCRIPTORS}")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise NodeError(f"expected a JSON object, found {data[:40]!r}") from None
    if not isinstance(body, dict) or not isinstance(body.get("type"), str):
        raise NodeError(f"expected a JSON object with a type, found {data[:40]!r}")
    return Message(body["type"], body, descriptors)


def text(body: Body, name: str) -> str:
    """A field that must be text. NodeError when it is not."""
    value = body.get(name)
    if not isinstance(value, str) or not value or "\0" in value:
        raise NodeError(f"{name}: expected text, found {value!r}")
    return value


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection between processes of our own."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
