"""The agent's listening socket. A path belongs to one agent. The file that a killed agent left there is replaced."""

from __future__ import annotations

import fcntl
import os
import socket
import stat

from ..errors import ConfigError

_BACKLOG = 256


class SocketFile:
    """A listening socket at ``path``, beside a lock file that shows whether its agent lives.

    ``prefixes`` are those of the tenant's models, if it is a tenant's socket. Raises ConfigError if it cannot listen
    there.
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
            # Any user may connect; credentials and this path decide what it gets (policy.py). The mode is not set
            # afterwards: whoever may write to the folder could have put a link to another file in its place.
            mask = os.umask(0o111)
            try:
                self.socket.bind(path)
            finally:
                os.umask(mask)
            self.socket.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"the node agent cannot listen at {path}: {error.strerror}; expected a folder that user {os.getuid()} "
                f"may write to, choose another path with --socket"
            ) from None

    def _lock(self) -> None:
        """Take a lock that belongs to the process, not to the descriptor, so that no child holds it after our end."""
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
        """Remove the socket of a killed agent, whose lock we have. Raises ConfigError if it is not a socket."""
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
        """Stop listening. May be called twice.

        The lock file stays. If it were removed, two agents could hold locks on two files of the same name.
        """
        if self._lock_fd >= 0:
            try:
                os.unlink(self.path)
            except FileNotFoundError:
                pass
            self.socket.close()
            os.close(self._lock_fd)
            self._lock_fd = -1
