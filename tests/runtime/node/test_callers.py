"""What the agent counts of its callers, and what it knows of the processes behind connections."""

from __future__ import annotations

import errno
import os
from typing import Any, cast

import pytest
from medusa_runtime.errors import NodeRefusedError
from medusa_runtime.node.callers.accounts import Accounts
from medusa_runtime.node.callers.peer import Caller, Peer, shares_mount_namespace
from medusa_runtime.node.settings import CallerLimits

STRANGER = Caller(Peer(1, 12345, 12345, same_pid_namespace=False))


class OldKernel:
    """A connection with this process, of which the kernel gives no descriptor of a process."""

    def __init__(self, error: int) -> None:
        self._error = error

    def getsockopt(self, _level: int, option: int, size: int) -> bytes:
        if size == 4:  # SO_PEERPIDFD
            raise OSError(self._error, os.strerror(self._error))
        if option == 17:  # SO_PEERCRED
            return b"".join(number.to_bytes(4, "little") for number in (os.getpid(), os.getuid(), os.getgid()))
        return b""


def test_a_refused_caller_gets_no_account() -> None:
    accounts = Accounts(CallerLimits(connections=1), 1000)
    accounts.charge(STRANGER, "connections")
    with pytest.raises(NodeRefusedError, match="expected at most 1"):
        accounts.charge(STRANGER, "connections")
    accounts.refund(STRANGER, "connections")
    with pytest.raises(NodeRefusedError):
        accounts.charge(STRANGER, "memory_bytes", 10**6)
    assert accounts.status(everybody=True)["callers"] == {}


@pytest.mark.parametrize(
    ("error", "lives"), [(errno.ENOPROTOOPT, True), (errno.EINVAL, False), (errno.ESRCH, False), (errno.ENODATA, False)]
)
def test_only_a_kernel_without_the_option_leaves_it_open_whether_a_peer_lives(error: int, lives: bool) -> None:
    """Linux 6.5 to 6.14 refuse with EINVAL to make a descriptor of a process that has been reaped, later ones ESRCH."""
    connection = cast(Any, OldKernel(error))
    assert Peer.of(connection).trusted is lives
    assert shares_mount_namespace(connection) is lives
