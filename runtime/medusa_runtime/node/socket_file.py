"""The agent's listening socket. A path belongs to one agent; what a killed one left there is taken over."""

from __future__ import annotations

import fcntl
import os
import socket
import stat

from ..errors import ConfigError

_BACKLOG = 256


class SocketFile:
    """Listens at ``path``, beside a lock file that shows whether an agent lives.

    ``prefixes``: the models of the tenant whose socket it is. Raises ConfigError when it cannot listen there.
    """

    def __init__(self, path: str, prefixes: tuple[str, ...] = ()) -> None:
        self.path = path
        self.prefixes = prefixes
        self._lock_fd = -1
        try:
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            self._lock_fd = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._lock()
            self._remove_stale()
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            self.socket.setblocking(False)
            self.socket.bind(path)
            os.chmod(path, 0o666)  # who may have what is decided by credentials and by this path; see policy.py
            self.socket.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"the node agent cannot listen at {path}: {error.strerror}; expected a folder that user {os.getuid()} "
                f"may write to, choose another path with --socket"
            ) from None

    def _lock(self) -> None:
        """Take the lock, the process's and not the descriptor's: no child of ours holds it when we are gone."""
        try:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            owner = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise ConfigError(
                f"another node agent (process {owner}) serves {self.path}; expected one agent a node, stop that one "
                f"or choose another path with --socket"
            ) from None
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, str(os.getpid()).encode(), 0)

    def _remove_stale(self) -> None:
        """Remove the socket of an agent that was killed: its lock is ours. ConfigError for what is no socket."""
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(status.st_mode):
            raise ConfigError(
                f"{self.path} is not a socket; expected --socket to name a new path, or one that an agent has used"
            )
        os.unlink(self.path)

    def close(self) -> None:
        """Stop listening. May be called twice. The lock file stays: two agents could hold two files of one name."""
        if self._lock_fd >= 0:
            try:
                os.unlink(self.path)
            except FileNotFoundError:
                pass
            self.socket.close()
            os.close(self._lock_fd)
            self._lock_fd = -1
