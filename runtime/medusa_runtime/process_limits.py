"""The limits of this process: the system's errors about them in words, and raising the limit of open files."""

from __future__ import annotations

import errno
import os
import resource

from .errors import LimitError

# The busiest process of a start has about thirty open descriptors, and one more for each client.
LEAST_FILES = 64
_MOST_FILES = 65536


def as_limit_error(error: BaseException) -> LimitError | None:
    """Return an error that says which limit ``error`` is about and how to raise it; None for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if _lacks_memory(error):
        return LimitError(
            f"there is no memory left: address space {_shown(resource.RLIMIT_AS)} kB (ulimit -v); raise that or the "
            f"container's memory"
        )
    if number == errno.EMFILE:
        return _too_few_files()
    if number == errno.ENFILE:
        return LimitError("this machine has no open files left (sysctl fs.file-max); end something, or raise it")
    if number == errno.EAGAIN or (isinstance(error, RuntimeError) and "start new thread" in str(error)):
        most = _shown(resource.RLIMIT_NPROC)
        return LimitError(
            f"no further process or thread could be made: expected room for about a hundred, found a limit of {most} "
            f"for this user (ulimit -u), or one of the container (pids){_address_space()}; raise it"
        )
    if number == errno.EFBIG:
        return LimitError(f"no file may be larger than {_shown(resource.RLIMIT_FSIZE)} kB (ulimit -f); raise that")
    if isinstance(error, OSError) and number in (errno.ENOSPC, errno.EDQUOT):
        where = "the output" if error.filename is None else error.filename
        return LimitError(f"there is no room left for {where}: a disk, or this user's share of it, is full; make room")
    if isinstance(error, OSError) and str(error.filename).startswith("/proc/") and not os.path.exists("/proc/self"):
        return LimitError("expected Linux's /proc, found none; mount it in the container (mount -t proc proc /proc)")
    if number in (errno.EPERM, errno.ENOSYS) and not _makes_memory_files():
        return LimitError("memfd_create is forbidden here; allow this system call in the container's seccomp profile")
    return None


def _makes_memory_files() -> bool:
    try:
        os.close(os.memfd_create("medusa-probe", os.MFD_CLOEXEC))
    except OSError:
        return False
    return True


def make_room_for_files() -> None:
    """Raise the limit of open files as far as allowed, since each client needs one. LimitError if it stays too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < LEAST_FILES:
        raise _too_few_files()


def check_files() -> None:
    """Raise LimitError where this process can open no further file, which some calls report as something else."""
    try:
        os.close(os.open("/", os.O_PATH | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE) and (limit := as_limit_error(error)):
            raise limit from None


def used_bytes(limit: int) -> int:
    """Return how much this process has of what a limit is about: RLIMIT_AS, all addresses, or RLIMIT_DATA."""
    name = {resource.RLIMIT_AS: b"VmSize:", resource.RLIMIT_DATA: b"VmData:"}[limit]
    with open("/proc/self/status", "rb") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) << 10


def most_files() -> int:
    """Return how many files this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


def _lacks_memory(error: BaseException) -> bool:
    """Return whether memory ran out, in the words of the system, of torch's allocator or of the dynamic loader."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError):
        return True
    text = str(error) if isinstance(error, RuntimeError | ImportError) else ""
    return "allocate memory" in text or "failed to map segment" in text


def _address_space() -> str:
    """Return, for a message, the limit of the address space, in which a thread's stack takes megabytes."""
    found = _shown(resource.RLIMIT_AS)
    return "" if found == "unlimited" else f", or of {found} kB of address space (ulimit -v)"


def _too_few_files() -> LimitError:
    found = _shown(resource.RLIMIT_NOFILE)
    return LimitError(
        f"expected room for {LEAST_FILES} open files and one a client, found {found} (ulimit -n); raise it"
    )


def _shown(limit: int) -> str:
    value = resource.getrlimit(limit)[0]
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    return str(value // 1024 if limit in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE) else value)
