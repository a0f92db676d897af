"""The listening sockets of an instance: one on the function's address, and the engine's private one."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress

from ..config import Settings
from ..errors import ConfigError
from ..process_limits import as_limit_error

_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # the second: a kernel without IPv6


def bind(settings: Settings) -> socket.socket:
    """Listen on the function's address. Raises ConfigError when the address is not available."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = None
    try:
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(2048)
    except (OSError, TypeError, ValueError) as error:  # the last two are for text that cannot be a host's name
        if listener is not None:
            listener.close()
        why = error.strerror if isinstance(error, OSError) else error
        if not isinstance(error, OSError) or isinstance(error, socket.gaierror) or error.errno in _NO_SUCH_ADDRESS:
            expected = "expected an address of this machine as --host, such as 0.0.0.0 or 127.0.0.1"
        else:
            expected = "expected a free port, choose another with --port (0 takes any)"
        raise ConfigError(f"cannot listen on {settings.host}:{settings.port}: {why}; {expected}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL at which the function can be reached: at 0.0.0.0 or [::], from other machines, too."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def private_listener() -> tuple[socket.socket, str]:
    """Open the engine's socket, and return it with the path by which this process and its forks can connect to it.

    The socket's name is removed at once, so no other process can connect, and a killed instance leaves nothing behind.
    The paths lead through descriptors in /proc. So they stay below the 107 bytes that the path of a Unix socket may
    have, and need no name. Raises ConfigError if no folder is writable.
    """
    folder = _private_folder()
    try:
        inside = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.bind(f"/proc/self/fd/{inside}/engine")
        listener.listen(64)
        named = os.open("engine", os.O_PATH | os.O_CLOEXEC, dir_fd=inside)
        os.close(inside)
    except OSError as error:
        if as_limit_error(error):
            raise
        raise _no_folder(error) from None
    finally:
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, "engine"))
        os.rmdir(folder)
    return listener, f"/proc/self/fd/{named}"


def _private_folder() -> str:
    """Make a new folder. The tempfile module would refuse a full disk, on which there is still room for a socket."""
    failures = []
    for place in filter(None, (os.environ.get("TMPDIR"), "/tmp", "/var/tmp")):
        folder = os.path.join(place, f"medusa-{os.urandom(8).hex()}")
        try:
            os.mkdir(folder, 0o700)
            return folder
        except OSError as error:
            failures.append(error)
    raise _no_folder(failures[0])


def _no_folder(error: OSError) -> ConfigError:
    return ConfigError(f"expected a writable folder for temporary files, found none ({error}); set TMPDIR")
