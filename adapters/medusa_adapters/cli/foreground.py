"""Run a command so that Ctrl-C always ends it, in a child process if it needs one.

Python turns Ctrl-C into an exception in whatever code runs at that moment. Inside a C++ extension that is being
imported (torch) it may be swallowed, or abort the process. The parent runs no such code: it waits, passes signals on,
and ends the processes that are left half a second after Ctrl-C. That costs 20 ms of CPU time, because the fork copies
pages that either process writes to. A command that imports no such extension and leaves no files needs no child.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Protocol

from medusa_runtime.process import adopt_orphans, die_with_parent, kill_children

INTERRUPTED = 130
_GRACE_S = 0.5  # for the command to clean up by itself
_KILLED_S = 2.0  # for the kernel to end a killed process
_SCRATCH = "medusa-scratch-"
_JUST_NOW_S = 10.0  # from a folder's creation to its lock, at most
_LOOK_S = 0.002  # between two looks whether killed processes have ended
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_WAITED_FOR = (*_PASSED_ON, signal.SIGCHLD)


class Removable(Protocol):
    def remove(self) -> None: ...


def end_at_interrupt() -> None:
    """End this process with status 130 at Ctrl-C, in whatever it does. Its forked children die with it."""

    def interrupted(*_: object) -> NoReturn:
        if os.isatty(2):
            os.write(2, b"\n")  # after the line of progress
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, interrupted)


def end(status: int) -> NoReturn:
    """End this process without finalizing the interpreter, which takes about 5 ms."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_in_child(command: Callable[[], int], leftovers: Iterable[Removable], *, scratch: bool) -> int:
    """Run ``command`` in a forked child and end with its exit status; with 130 after Ctrl-C, within a second.

    This returns only in the child, with the result of ``command``. With ``scratch``, its temporary files are in a
    folder that is removed when it has ended. The ``leftovers`` of an interrupted command are removed. The caller must
    have a single thread.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    # Processes that the command leaves behind become children of ours, so that we can end them.
    adopt_orphans()
    folder = _scratch() if scratch else None
    parent, child = os.getpid(), os.fork()
    if not child:
        die_with_parent(parent)
        if folder is not None:
            _use_scratch(folder)
        signal.signal(signal.SIGINT, _interrupt)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return command()
    try:
        status, interrupted = _wait(child)
        if interrupted:
            _end_orphans()
            for leftover in leftovers:
                leftover.remove()
            status = INTERRUPTED
    finally:
        if folder is not None:
            import shutil

            shutil.rmtree(folder, ignore_errors=True)
    if status < 0:
        _die_of(-status)
    end(status)


def _interrupt(_number: int, _frame: object) -> None:
    """Raise KeyboardInterrupt once. A second one would interrupt the clean-up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # C++ prints a message when the exception passes through it, which the user need not see.
    nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    os.dup2(nothing, 2)
    os.close(nothing)
    raise KeyboardInterrupt


def _scratch() -> Path | None:
    """Make a folder for the command's temporary files. Return None if that fails: the command itself reports it.

    This process and its children hold the folder's lock. A folder whose lock nobody holds any more is that of a command
    that was killed (SIGKILL), and is removed.
    """
    import fcntl  # not for the commands that need no such folder
    import tempfile

    try:
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        fcntl.flock(os.open(folder, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_EX)
    except OSError:
        return None
    for other in folder.parent.glob(f"{_SCRATCH}*"):
        with suppress(OSError):
            _remove_if_left(other)
    return folder


def _remove_if_left(folder: Path) -> None:
    """Remove a command's folder, unless the command runs or began just now. Raises OSError if it does."""
    import fcntl
    import shutil

    found = os.lstat(folder)
    if found.st_uid != os.geteuid() or time.time() - found.st_mtime < _JUST_NOW_S:
        return
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(opened)


def _use_scratch(folder: Path) -> None:
    import tempfile

    tempfile.tempdir = str(folder)


def _wait(child: int) -> tuple[int, bool]:
    """Return the child's exit status (negative: the signal that ended it), and whether Ctrl-C was pressed."""
    deadline: float | None = None
    interrupted, reason = False, 0  # the signal for which it is to end
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), interrupted
        left_s = 3600.0 if deadline is None else max(deadline - time.monotonic(), 0)
        received = signal.sigtimedwait(_WAITED_FOR, left_s)
        if received is None and deadline is not None:
            os.kill(child, signal.SIGKILL)
            _wait_for_killed(child)
            return -reason, interrupted
        if received is not None and received.si_signo in _PASSED_ON:
            # A terminal has sent it to the child already, whose handler only counts one.
            os.kill(child, received.si_signo)
            interrupted = interrupted or received.si_signo == signal.SIGINT
            if received.si_signo in (signal.SIGINT, signal.SIGTERM) and deadline is None:
                deadline, reason = time.monotonic() + _GRACE_S, received.si_signo


def _wait_for_killed(child: int) -> None:
    """Wait for a killed child, for a while: the kernel does not kill one that waits for some file systems (FUSE)."""
    deadline = time.monotonic() + _KILLED_S
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            why = "it may wait for a file system that does not answer"
            print(f"medusa: process {child} was killed and has not ended; {why}", file=sys.stderr)
            return
        time.sleep(_LOOK_S)


def _end_orphans() -> None:
    """Kill the processes that an interrupted command left behind, and their children."""
    deadline = time.monotonic() + _GRACE_S / 2
    while kill_children() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _die_of(number: int) -> NoReturn:
    """End by the signal that ended the child, so that a shell reports it ("Killed")."""
    signal.signal(number, signal.SIG_DFL) if number not in (signal.SIGKILL, signal.SIGSTOP) else None
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)
