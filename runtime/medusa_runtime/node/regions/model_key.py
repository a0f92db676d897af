"""What a checkpoint is called between functions and agent, and proof that a function sees a local one."""

from __future__ import annotations

import fcntl
import os
from urllib.parse import unquote, urlsplit

from ...errors import NodeError, NodeRefusedError
from ...storage.base import redacted, scheme_of


def model_key(url: str) -> str:
    """One name for one checkpoint. NodeError for a local path that is not absolute, or a URL that leads upwards."""
    if scheme_of(url) not in ("", "file"):
        if ".." in unquote(url).split("/"):
            raise NodeError(f"{redacted(url)}: expected a URL without '..'")
        return url.rstrip("/")
    path = _local_path(url)
    if not path.startswith("/"):
        raise NodeError(f"{url}: expected an absolute path; the agent has another working folder")
    return os.path.normpath(path)


def absolute(url: str) -> str:
    """As seen from another process: a relative path is this one's."""
    return url if scheme_of(url) else os.path.abspath(os.path.expanduser(url))


def _local_path(url: str) -> str:
    return unquote(urlsplit(url).path) if scheme_of(url) else url


def check_access_proof(key: str, descriptors: list[int]) -> None:
    """NodeRefusedError unless the asker has shown that it sees a local checkpoint: it sends its open folder.

    The agent may read more than its askers, and they may have other mounts: a path alone proves nothing. Only
    whoever opened the very folder (or file) that the agent finds at this path is given what is in it.
    """
    if scheme_of(key):
        return
    try:
        here = os.stat(key)
        # O_PATH opens also what its opener may not read.
        seen = [os.fstat(fd) for fd in descriptors[:1] if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_PATH]
    except OSError as error:
        raise NodeRefusedError(f"{key}: the node agent cannot see it: {error.strerror}") from None
    if not any((there.st_dev, there.st_ino) == (here.st_dev, here.st_ino) for there in seen):
        raise NodeRefusedError(f"{key}: expected the same folder for the function and the node agent, found another")


def open_access_proof(url: str) -> int | None:
    """What ``check_access_proof`` wants to see of a local checkpoint; None of others, and of what cannot be opened."""
    if scheme_of(url) not in ("", "file"):
        return None
    try:
        return os.open(_local_path(url), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
