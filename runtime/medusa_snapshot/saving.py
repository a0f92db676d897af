"""Save a process as a snapshot."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import marshal
import os
import resource
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from .conditions import conditions, files
from .library_files import is_kept
from .resuming import CONDITIONS, MEMORY, note_generators, place, start_resumed

_PROBLEM_BYTES = 500
# Libraries of products read the kind of an aarch64 processor here when they are loaded, and one leaves the file open.
_PROCESSOR = "/sys/devices/system/cpu/"


class SnapshotError(Exception):
    """This process cannot be saved; the message says why."""


def leave_room() -> None:
    """Call this in the process that is going to execute the one that will be saved.

    On aarch64, kernels may map the libraries of all processes within the same GiB, so that those of the saved one would
    lie where the one that continues has its own. Without a limit for the stack, they map them elsewhere.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if os.uname().machine == "aarch64" and hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_STACK, (hard, hard))


def save(
    folder: str,
    name: str,
    library: Path,
    environ: Mapping[str, str],
    resumed: Callable[[list[str]], int],
    prefixes: tuple[str, ...] = (),
) -> Path:
    """Save this process as the snapshot ``name`` in a folder, and return where it is.

    A process that continues from it calls ``resumed`` with what ``start_resumed`` returns, and ends with the status
    that this returns. ``library`` is the compiled library; the program that continues is beside it. ``environ`` is the
    environment in which the modules were imported, and ``prefixes`` are those of the variables that they read, beside
    the ones that every snapshot depends on.

    Raises SnapshotError if this process has threads, open files other than the standard ones, or memory that it shares,
    and OSError if files cannot be written.
    """
    call, program = _saving_function(library), library.with_name("medusa-resume")
    thread_id_at = _thread_id_offset()
    target = Path(place(folder, name))
    new = target.with_name(f".new-{target.name}-{os.getpid()}")
    if not program.exists():
        raise SnapshotError(f"expected the program {program}, found none; it is built with the compiled kernels")
    kept = _check_alone()
    remove_unfinished(target)
    new.mkdir(mode=0o700, parents=True)
    try:
        gc.collect()
        note_generators()
        gc.freeze()  # the collector would otherwise write to, and so copy, every page of a process that continues
        problem = ctypes.create_string_buffer(_PROBLEM_BYTES)
        memory_fd = os.open(new / MEMORY, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        result = call(memory_fd, thread_id_at, problem, _PROBLEM_BYTES)
        if result > 0:
            _run(resumed, result, kept)  # from here on, this is another process
        memory_bytes = os.fstat(memory_fd).st_size
        os.close(memory_fd)
        _check(result, problem.value)
        modules = list(sys.modules.values())
        saved = {
            **conditions(environ, prefixes),
            "files": files(modules, sys.path),
            "memory_bytes": memory_bytes,
            "program": str(program),
        }
        (new / CONDITIONS).write_bytes(marshal.dumps(saved))
        for path, mode in ((new, 0o755), (new / CONDITIONS, 0o644), (new / MEMORY, 0o644)):
            path.chmod(mode)  # whatever the umask
        _replace(target, new)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return target


def remove_unfinished(target: Path) -> None:
    """Remove what processes have left that were killed while they saved."""
    for path in target.parent.glob(f".new-{target.name}-*"):
        if not os.path.exists(f"/proc/{path.name.rpartition('-')[2]}") or path.name.endswith(f"-{os.getpid()}"):
            shutil.rmtree(path, ignore_errors=True)


def _replace(target: Path, new: Path) -> None:
    """Put a new snapshot in the place of an old one. Of processes that do so at the same time, the last one wins."""
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        shutil.rmtree(target, ignore_errors=True)
        new.rename(target)
    finally:
        os.close(folder)


def _saving_function(library: Path) -> Callable[..., int]:
    try:
        # PyDLL keeps the interpreter's lock: nothing else may run, and the process that continues has to hold it.
        function = ctypes.PyDLL(str(library)).medusa_save_snapshot
    except (OSError, AttributeError):
        raise SnapshotError("expected the compiled kernels, found none; see `medusa doctor`") from None
    function.argtypes = ctypes.c_int, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t
    function.restype = ctypes.c_int
    return function


def _thread_id_offset() -> int:
    """Return where glibc's description of a thread has the thread's id. For debuggers it says: bits, count, offset."""
    try:
        return (ctypes.c_uint32 * 3).in_dll(ctypes.CDLL(None), "_thread_db_pthread_tid")[2]
    except ValueError:
        raise SnapshotError("expected a glibc that says where it keeps the id of a thread, found another") from None


def _check_alone() -> dict[int, str]:
    """Return the files that libraries keep open."""
    kept = {}
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        raise SnapshotError(f"expected a process with one thread, found {threads}")
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and (found := _open_file(number)) is not None:
            if found.startswith(_PROCESSOR):
                os.close(number)
            elif is_kept(found):
                kept[number] = found
            else:
                raise SnapshotError(f"expected a process without open files, found {found}")
    return kept


def _check(result: int, problem: bytes) -> None:
    if result < 0:
        raise SnapshotError(f"this process cannot be saved: {problem.decode(errors='replace')}")


def _open_file(number: int) -> str | None:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return None  # it was the listing of the folder


def _run(resumed: Callable[[list[str]], int], message_fd: int, kept: Mapping[int, str]) -> NoReturn:
    status = 70
    try:
        status = resumed(start_resumed(message_fd, kept))
    except SystemExit as request:
        status = request.code if isinstance(request.code, int) else int(request.code is not None)
        if isinstance(request.code, str):
            print(request.code, file=sys.stderr)
    except KeyboardInterrupt:
        status = 130
    except BaseException:  # noqa: BLE001
        import traceback

        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)
