"""Child processes: forking them, ending them with their parent, and reporting why they failed."""

from __future__ import annotations

import array
import ctypes
import json
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from .errors import MedusaError
from .process_limits import as_limit_error
from .timeline import Timeline

if TYPE_CHECKING:
    import subprocess

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_SPINS = 2000  # some 30 µs
_LONGEST_REPORT_BYTES = 3500  # the kernel writes up to 4096 to a pipe as a whole (pipe(7))
_DESCRIPTOR_BYTES = 4
_LONGEST_NAME = 200  # characters of a process's name in a report; each takes up to 12 bytes of JSON
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP)


class HasFileno(Protocol):
    """Anything with a descriptor, such as a socket."""

    def fileno(self) -> int: ...


class Report(NamedTuple):
    """A child's fatal error, as it reached the supervisor."""

    process: str
    code: str
    message: str


class ReportPipe:
    """Carries fatal errors from any process of the instance to its supervisor, one JSON line each."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    @classmethod
    def of(cls, write_fd: int) -> ReportPipe:
        """Return a pipe for sending alone, from a writing end that another process has passed on."""
        pipe = cls.__new__(cls)
        pipe.read_fd, pipe.write_fd = -1, write_fd
        return pipe

    def send(self, process: str, error: BaseException) -> None:
        """Report an error. One that is neither ours nor about a limit is also logged, with its traceback."""
        if not isinstance(error, MedusaError):
            known = as_limit_error(error)
            if known is None:
                logger.error("%s failed", process, exc_info=error)
            error = known or MedusaError(f"{process} failed: {type(error).__name__}: {error}")
        process, message = process[:_LONGEST_NAME], str(error)[:_LONGEST_REPORT_BYTES]
        while len(line := json.dumps([process, error.code, message])) > _LONGEST_REPORT_BYTES:
            message = message[: len(message) * 7 // 8] + "…"
        try:
            os.write(self.write_fd, line.encode() + b"\n")
        except OSError:
            logger.exception("could not report to the supervisor: %s", line)

    def read(self) -> list[Report]:
        try:
            data = os.read(self.read_fd, 1 << 16)
        except BlockingIOError:
            return []
        return [Report(*json.loads(line)) for line in data.splitlines()]

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self.write_fd)


def fork(name: str, body: Callable[[Timeline], int], *, timeline: Timeline, reports: ReportPipe) -> int:
    """Run ``body`` in a forked child and return the child's pid. The child's exit status is what ``body`` returns.

    ``body`` gets the timeline under the child's name, in which the fork itself is the first stage.

    The child dies with its parent. It has a process group of its own, so that Ctrl-C in a terminal reaches the
    supervisor alone. An error of ``body`` is reported: a MedusaError ends the child with status 1, and any other
    exception with status 70. The parent must have a single thread.
    """
    parent, start_ns = os.getpid(), time.monotonic_ns()
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal that arrives before the child has its own handlers would run the parent's handlers, and be lost.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        pid = os.fork()
        if not pid:
            timeline = timeline.named(name)

            def run() -> int:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                timeline.record("fork", start_ns, time.monotonic_ns())
                return body(timeline)

            _child(name, run, reports, parent)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _child(name: str, body: Callable[[], int], reports: ReportPipe, parent: int) -> NoReturn:
    status = 70
    try:
        die_with_parent(parent)
        name_process(name)
        os.setpgid(0, 0)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        status = body()
    except MedusaError as error:
        reports.send(name, error)
        status = 1
    except SystemExit as request:
        status = request.code if isinstance(request.code, int) else 1
    except BaseException as error:  # noqa: BLE001  it is reported, and the process ends
        reports.send(name, error)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)  # never run the parent's exit handlers


def share_cores() -> None:
    """Let OpenMP's threads sleep when they have waited for some microseconds, in processes that are forked from now on.

    By default they spin for milliseconds (libgomp), which is best where nothing else needs the cores. Here an HTTP
    server, a fetch and other containers do, and a spinning thread may take the core from the thread it waits for. A
    variable that the user has set stays as it is.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(_SPINS)


def name_process(name: str) -> None:
    """Set the name that ps, top and /proc/PID/comm show for this process (15 bytes are kept)."""
    with suppress(OSError), open("/proc/self/comm", "w") as comm:  # it may have no descriptor left, and need none
        comm.write(name)


def end_first() -> None:
    """Ask the kernel to kill this process before others when the machine or the container runs out of memory."""
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("900")
    except OSError:
        pass  # this kernel or sandbox has no such file


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Return the process ids of this process's children; none where the kernel does not list them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return set(map(int, file.read().split()))
    except OSError:
        return set()


def kill_children(but: Iterable[int] = ()) -> bool:
    """Kill this process's children except those in ``but``, and return whether there were any to kill.

    Call it again until it returns False: the children of a killed process become this one's, if ``adopt_orphans`` was
    called before they were started.
    """
    pids = children().difference(but)
    for pid in pids:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
    return bool(pids)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends (prctl(2), PR_SET_PDEATHSIG).

    ``parent`` is the parent's id. If the parent has ended already, this process exits with status 1.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def abort() -> NoReturn:
    """End this process by SIGABRT, without a core dump.

    A dump has the memory that processes share, such as a region of many GB. While the kernel writes it, a device's
    memory stays taken.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.abort()


def terminate(process: subprocess.Popen[Any], within_s: float) -> int:
    """End a process by SIGTERM, or by SIGKILL if it is still there after ``within_s`` seconds. Returns its status."""
    from subprocess import TimeoutExpired

    process.terminate()  # does nothing if the process has ended
    try:
        return process.wait(within_s)
    except TimeoutExpired:
        process.kill()
        return process.wait()


def wait_readable(source: HasFileno | int, timeout_s: float) -> bool:
    """Wait until a descriptor can be read or has ended, and return True; False after ``timeout_s``.

    This polls, because select(2) takes no descriptor above 1023, and a busy function has such.
    """
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def receive_descriptors(
    connection: socket.socket, size_bytes: int, most: int, flags: int = 0
) -> tuple[bytes, list[int], int]:
    """Receive at most this many bytes and descriptors, and the flags of the message, as recvmsg(2) does.

    No process that this one executes inherits the descriptors. ``socket.recv_fds`` ignores its flags, also those that
    would say so.
    """
    room = socket.CMSG_LEN(most * _DESCRIPTOR_BYTES)
    data, ancillary, found_flags, _ = connection.recvmsg(size_bytes, room, flags | socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, packed in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(packed[: len(packed) - len(packed) % _DESCRIPTOR_BYTES])
    return data, list(found), found_flags


def hang_up(connection: socket.socket) -> None:
    """End a connection for all threads and processes that have it, and wake those that wait for it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has already ended
