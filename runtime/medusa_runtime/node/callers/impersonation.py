"""Reading local files with the rights of the caller who asks for them, in a child process that becomes that user.

The agent may read more than its callers. So it never opens a path that a caller names: the caller sends its open
folder, and a prefetcher with no more rights than the caller opens what is in it, each file once. What the index says
and what an engine process maps come from the same open files.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import struct
from typing import NamedTuple

from ...errors import NodeRefusedError
from ...process import die_with_parent
from ...storage.base import scheme_of
from .file_status import file_status

_CAPABILITY_VERSION = 0x20080522  # capset(2), version 3
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}


class Identity(NamedTuple):
    """The user and groups whose rights files are read with.

    ``confined``: only files below the folder, for the caller may see other files than the agent.
    """

    uid: int
    gid: int
    groups: tuple[int, ...]
    confined: bool


class Folder(NamedTuple):
    """A local checkpoint's open folder, ``fd``, which the holder closes. Without ``identity`` the agent reads it."""

    fd: int
    identity: Identity | None = None

    def slot(self, key: str) -> str:
        """Return the name of its region: what was read with one identity's rights is shared with no other."""
        if self.identity is None:
            return key
        uid, gid, groups, confined = self.identity
        status = file_status(self.fd)
        rights = f"{uid}:{gid}:{','.join(map(str, groups))}:{int(confined)}"
        return f"{key}\0{rights}\0{status.device}:{status.number}"


def folder_of(key: str, descriptors: list[int]) -> int:
    """Return the folder that a caller has sent, as a new descriptor. NodeRefusedError for anything else."""
    assert not scheme_of(key)
    for descriptor in descriptors[:1]:
        # O_PATH opens also what its opener may not read.
        readable = not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_PATH
        if readable and stat.S_ISDIR(file_status(descriptor).mode):
            return os.dup(descriptor)
    raise NodeRefusedError(
        f"{key}: expected the checkpoint's folder, opened for reading by the caller; found nothing that can be read"
    )


def become(identity: Identity) -> None:
    """Give up every right of this process that the caller does not have. NodeRefusedError where that is not possible.

    What is needed afterwards must be imported before: the caller may not be allowed to read the agent's own files.
    """
    parent = os.getppid()
    try:
        if identity.uid != os.geteuid():
            os.setgroups(identity.groups)
            os.setresgid(identity.gid, identity.gid, identity.gid)
            os.setresuid(identity.uid, identity.uid, identity.uid)
        else:
            _drop_capabilities()
    except OSError as error:
        raise NodeRefusedError(
            f"the node agent (user {os.geteuid()}) cannot read files as user {identity.uid}: {error.strerror}; "
            f"expected an agent that is the function's own user, or root with CAP_SETUID and CAP_SETGID"
        ) from None
    die_with_parent(parent)  # the kernel forgets it with the old user


def _drop_capabilities() -> None:
    """Root of another container has the agent's number, but may have fewer rights than the agent."""
    number = _SYS_CAPSET.get(os.uname().machine)
    if number is None:
        raise NodeRefusedError(f"files cannot be read for another container's root on {os.uname().machine}")
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, header, bytes(24)):
        failed = ctypes.get_errno()
        raise OSError(failed, os.strerror(failed))
