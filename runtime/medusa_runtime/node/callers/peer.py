"""The process on the other end of a connection: what the kernel says about it, and which socket it connected to."""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
from typing import NamedTuple

_CREDENTIALS = struct.Struct("iII")
_GROUPS = struct.Struct("I")
_SO_PEERGROUPS, _SO_PEERPIDFD = 59, 77  # socket(7); the second since Linux 6.5
_REAPED = (errno.EINVAL, errno.ESRCH, errno.ENODATA)  # how kernels refuse a descriptor of a process that is gone
_MOST_GROUPS_BYTES = 1024  # what Python's getsockopt returns at most


class Peer(NamedTuple):
    """The credentials of the process that connected, as the kernel recorded them (SO_PEERCRED, SO_PEERGROUPS).

    ``same_pid_namespace`` says that it runs in this process's own PID namespace, and so not in another container.
    """

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    same_pid_namespace: bool = True

    @classmethod
    def of(cls, connection: socket.socket) -> Peer:
        """Return the peer of a connected Unix socket. Raises OSError if this process can open no file to look at it."""
        packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, gid = _CREDENTIALS.unpack(packed)
        return cls(
            pid, uid, gid, _groups(connection), uid in (0, os.geteuid()) and _in_same_pid_namespace(connection, pid)
        )

    @property
    def trusted(self) -> bool:
        """Whether it may change what other callers get: it is the agent's own user or root, and in no other container.

        The root user of another container also has the number 0, but has no more rights here than any other user.
        """
        return self.same_pid_namespace and self.uid in (0, os.geteuid())


class Caller(NamedTuple):
    """A peer and the path of the agent's socket that it connected to.

    ``prefixes`` are those of the models that the socket's tenant may have. They are empty if the socket is no tenant's.
    """

    peer: Peer
    socket: str = ""
    prefixes: tuple[str, ...] = ()

    @property
    def trusted(self) -> bool:
        """Whether the caller may pin, drop and refresh models. On a tenant's socket, no caller may."""
        return self.peer.trusted and not self.prefixes

    @property
    def account(self) -> str:
        """The account to which memory, connections, fetches and engines are charged: a tenant's socket, or the user."""
        return self.socket if self.prefixes else f"user {self.peer.uid}"


def shares_mount_namespace(connection: socket.socket) -> bool:
    """Return whether the peer is in this process's mount namespace; False if the kernel does not say."""
    pid = Peer.of(connection).pid
    try:
        theirs, ours = os.stat(f"/proc/{pid}/ns/mnt"), os.stat("/proc/self/ns/mnt")
    except OSError:
        return False
    return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino) and _is_alive(connection)


def _groups(connection: socket.socket) -> tuple[int, ...]:
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_GROUPS_BYTES)
    except OSError:
        return ()  # too many, or an old kernel; files are then read without the rights of the caller's groups
    return tuple(sorted(group for (group,) in _GROUPS.iter_unpack(packed)))


def _in_same_pid_namespace(connection: socket.socket, pid: int) -> bool:
    """Return whether a process is in this process's own PID namespace.

    A process in a nested PID namespace has several numbers. One in a namespace beside this one has no number here.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            numbers = next((line.split()[1:] for line in status if line.startswith(b"NSpid:")), [])
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return False
    return len(numbers) == 1 and _is_alive(connection)


def _is_alive(connection: socket.socket) -> bool:
    """Return whether the process that connected still exists. If not, another process may have its number by now."""
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
    except OSError as error:
        return error.errno not in _REAPED  # an older kernel, where the number has to be trusted
    pidfd = int.from_bytes(packed, "little")
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True
