"""Read local files with the rights of the caller that asks for them, in a child process that becomes that user.

The agent may read more than its callers. So it never opens a path that a caller names. Instead, the caller sends its
open folder, and a prefetcher with no more rights than the caller opens the files in it, each of them once. The index is
read from the same open files that an engine process maps.
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
    """The user and groups with whose rights files are read.

    ``confined`` allows only files below the folder, because the caller may see another file system than the agent.
    """

    uid: int
    gid: int
    groups: tuple[int, ...]
    confined: bool


class Folder(NamedTuple):
    """The open folder ``fd`` of a local checkpoint, which its holder closes.

    Without ``identity``, it is read with the agent's own rights.
    """

    fd: int
    identity: Identity | None = None

    def slot(self, key: str) -> str:
        """Return the slot of the checkpoint's region. Regions that were read with different rights are never shared."""
        if self.identity is None:
            return key
        uid, gid, groups, confined = self.identity
        status = file_status(self.fd)
        rights = f"{uid}:{gid}:{','.join(map(str, groups))}:{int(confined)}"
        return f"{key}\0{rights}\0{status.device}:{status.number}"


def received_folder(key: str, descriptors: list[int]) -> int:
    """Return the folder that a caller has sent, as a new descriptor. Raises NodeRefusedError if it sent none."""
    assert not scheme_of(key)
    for descriptor in descriptors[:1]:
        # O_PATH also opens folders that the caller may not read.
        readable = not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_PATH
        if readable and stat.S_ISDIR(file_status(descriptor).mode):
            return os.dup(descriptor)
    raise NodeRefusedError(
        f"{key}: expected the checkpoint's folder, opened for reading by the caller; found nothing that can be read"
    )


def assume_identity(identity: Identity) -> None:
    """Give up every right of this process that the caller does not have.

    Modules that are needed afterwards must be imported before, since the caller may not be able to read the agent's own
    files. Raises NodeRefusedError if it is not possible.
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
    die_with_parent(parent)  # again, because the kernel forgets this when the user changes


def _drop_capabilities() -> None:
    """Drop all capabilities. The root user of another container has the agent's user id, but may have fewer rights."""
    number = _SYS_CAPSET.get(os.uname().machine)
    if number is None:
        raise NodeRefusedError(f"files cannot be read for another container's root on {os.uname().machine}")
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, header, bytes(24)):
        failed = ctypes.get_errno()
        raise OSError(failed, os.strerror(failed))
