"""Linux's calls for namespaces and mounts, from which nodes are made. Python has some of them only from 3.12 on."""

from __future__ import annotations

import ctypes
import os
import signal

NEWNS = 0x00020000
NEWUTS = 0x04000000
NEWIPC = 0x08000000
NEWPID = 0x20000000
NEWNET = 0x40000000
NODE = NEWNET | NEWNS | NEWUTS | NEWIPC | NEWPID

_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_libc = ctypes.CDLL(None, use_errno=True)


def unshare(kinds: int) -> None:
    """Give this process new namespaces (unshare(2)). A new process namespace takes effect for its children."""
    _check(_libc.unshare(kinds), "unshare")


def enter(pid: int, kinds: int) -> None:
    """Move this thread into another process's namespaces (setns(2)). A process namespace takes effect for children."""
    descriptor = os.pidfd_open(pid)
    try:
        _check(_libc.setns(descriptor, kinds), "setns")
    finally:
        os.close(descriptor)


def enter_namespace(descriptor: int) -> None:
    """Move this thread into the namespace whose file under /proc is open as ``descriptor``."""
    _check(_libc.setns(descriptor, 0), "setns")


def make_mounts_private() -> None:
    """Hide this process's mounts from its parent's namespace, and the parent's from this one."""
    _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount /")


def mount(kind: str, place: str, options: str = "") -> None:
    _check(_libc.mount(kind.encode(), place.encode(), kind.encode(), 0, options.encode()), f"mount {place}")


def bind(source: str, place: str) -> None:
    _check(_libc.mount(source.encode(), place.encode(), None, _MS_BIND, None), f"mount {place}")


def set_hostname(name: str) -> None:
    _check(_libc.sethostname(name.encode(), len(name.encode())), "sethostname")


def missing_capabilities() -> list[str]:
    """Return the names of the capabilities that a laboratory needs and this process does not have."""
    with open("/proc/self/status") as status:
        held = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    return [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends. Check afterwards that it had not ended before."""
    _check(_libc.prctl(1, signal.SIGKILL, 0, 0, 0), "prctl")


def restore_signals() -> None:
    """Restore the signals that Python ignores from its start, because an executed program would inherit that."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


def _check(result: int, call: str) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
