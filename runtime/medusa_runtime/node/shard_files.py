"""The open files of a local model's shards, which wait in a Unix socket until an engine process takes them.

The agent holds the socket, and never the files. Their file system may be a caller's own (FUSE). It is asked whenever a
process closes one of them (FLUSH), also a child that was forked with it, and that process cannot even be killed before
there is an answer. What a socket holds is not closed in this sense when the socket is (unix(7), SCM_RIGHTS).
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from .messages import MOST_INTERNAL_DESCRIPTORS, channel_pair, close_without_linger, receive, send


def hold(files: Sequence[int]) -> socket.socket | None:
    """Return a socket that holds duplicates of these files; None if there are no files, or too many for a socket."""
    if not 0 < len(files) <= MOST_INTERNAL_DESCRIPTORS:
        return None
    held, sender = channel_pair()
    with sender:
        try:
            send(sender, "files", None, files)
        except OSError as error:
            held.close()
            if error.errno != errno.ETOOMANYREFS:  # too many files of this user are in sockets
                raise
            return None
    return held


def held_files(descriptor: int) -> list[int]:
    """Return duplicates of the files that such a socket holds, and close this descriptor of it."""
    connection = socket.socket(fileno=descriptor)
    try:
        # Others may take the files, too, so they stay there.
        message = receive(connection, MOST_INTERNAL_DESCRIPTORS, socket.MSG_PEEK)
    finally:
        connection.detach()
        close_without_linger([descriptor])
    assert message is not None
    return message.descriptors


__all__ = ["held_files", "hold"]
