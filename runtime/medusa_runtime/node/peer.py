"""Whoever is on the other end of a connection, as the kernel tells it."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

_CREDENTIALS = struct.Struct("iII")


class Peer(NamedTuple):
    """Whoever is on the other end of a connection, as the kernel tells it (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int

    @classmethod
    def of(cls, connection: socket.socket) -> Peer:
        return cls(
            *_CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        )

    @property
    def trusted(self) -> bool:
        """May change what others get: root, and the agent's own user."""
        return self.uid in (0, os.getuid())
