"""Continue from a snapshot, and what a process does first that has been continued."""

from __future__ import annotations

import io
import marshal
import os
import sys
import time

from .conditions import conditions, difference, mapped_files, processor
from .library_files import reopen

TYPE_CHECKING = False  # typing takes several milliseconds to import
if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, NoReturn, TextIO

MEMORY, CONDITIONS = "memory", "conditions"
_VARIABLE = "MEDUSA_RESUME"
_TRIES = 3
# What packages call OpenBLAS's function that takes a number of threads.
_OPENBLAS_FUNCTIONS = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")
)
_UNLIMITED_STACK_BYTES = 2 << 20  # what glibc gives a thread where there is no limit
_MOST_CONDITIONS_BYTES = 16 << 20
_generators: list[random.Random] = []


def default_folder() -> str:
    """Return the folder for the snapshots of this installation."""
    return os.path.join(sys.prefix, "share", "medusa", "snapshots")


def place(folder: str, name: str) -> str:
    """Return where the snapshot of this name is that is made on a processor like this machine's."""
    code = 0
    for byte in " ".join(processor()).encode():  # hashlib takes longer to import
        code = (code * 31 + byte) % (1 << 48)
    return os.path.join(folder, f"{name}-{code:012x}")


def has_started_anew() -> bool:
    """Return whether this process has given up the snapshot that it continued from. A new one would be no better."""
    return _VARIABLE in os.environ


def resume(folder: str, name: str, arguments: Sequence[str], prefixes: tuple[str, ...] = ()) -> str | None:
    """Become the process of a snapshot, with this one's descriptors, environment and working directory.

    It goes on with the ``arguments``. This function returns only if there is no snapshot that can be used: None if
    there is none, and otherwise the reason. A folder may have several, of different processors. ``prefixes`` are as
    they were when it was saved.
    """
    if (why := os.environ.pop(_VARIABLE, None)) is not None:  # it was continued, and has started anew
        return why
    try:
        paths = _places(folder, name)
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    if not paths:
        return None
    now = conditions(os.environ, prefixes)
    reasons = [_use(path, now, lambda program, memory_fd: _execute(program, memory_fd, arguments)) for path in paths]
    return reasons[0]


def look(folder: str, name: str, prefixes: tuple[str, ...] = ()) -> tuple[str, str | None] | None:
    """Return the snapshot that a start would use, with None, or the likeliest one and why it cannot be used.

    Returns None if there is none.
    """
    try:
        paths = _places(folder, name)
    except OSError as error:
        return folder, f"{error.filename} cannot be read: {error.strerror}"
    now = conditions(os.environ, prefixes)
    found = [(path, _use(path, now, lambda *_: None)) for path in paths]
    return next((each for each in found if each[1] is None), found[0]) if found else None


def _places(folder: str, name: str) -> list[str]:
    """Return where snapshots are, first the one that is made on a processor like this machine's.

    Raises OSError if the folder is there but cannot be read.
    """
    try:
        paths = [os.path.join(folder, each) for each in os.listdir(folder) if each.startswith(name + "-")]
    except FileNotFoundError:
        return []
    best = place(folder, name) if paths else ""
    return sorted(paths, key=lambda path: path != best)


def _use(path: str, now: dict[str, Any], use: Callable[[str, int], str | None]) -> str | None:
    """Call ``use`` with the program that continues this snapshot, and with its memory. Or return why it cannot be."""
    opened: list[int] = []
    try:
        opened.append(inside := os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        for file in (CONDITIONS, MEMORY):
            opened.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC, dir_fd=inside))
        for fd in opened:
            if (why := _distrust(fd)) is not None:
                return why
        _, conditions_fd, memory_fd = opened
        saved = marshal.loads(os.read(conditions_fd, _MOST_CONDITIONS_BYTES))
        if os.fstat(memory_fd).st_size != saved["memory_bytes"]:
            return "its memory was not written as a whole"
        return difference(saved, now) or use(saved["program"], memory_fd)
    except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
        return f"it cannot be read ({error})"
    finally:
        for fd in opened:
            os.close(fd)


def _distrust(fd: int) -> str | None:
    """Return why what this file says must not be run, or None."""
    status = os.fstat(fd)
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}, and would be run as code; expected root or user {os.geteuid()}"
    if status.st_mode & 0o022:
        return "others than its owner may write to it, and it would be run as code"
    return None


def _execute(program: str, memory_fd: int, arguments: Sequence[str]) -> str:
    if not sys.executable:
        return "Python does not know where it is"
    with open("/proc/self/comm") as file:
        name = file.read()  # execution will change it
    message = {
        "arguments": list(arguments),
        "environ": dict(os.environ),
        "path": sys.path,
        "argv": [sys.argv[0], *arguments],
        "orig_argv": sys.orig_argv,
        "dont_write_bytecode": sys.dont_write_bytecode,
        "streams": [_nature(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "name": name,
    }
    message_fd = os.memfd_create("medusa-resume", 0)
    os.write(message_fd, marshal.dumps(message))
    try:
        os.set_inheritable(memory_fd, True)
        # If memory cannot be mapped, the program executes this one anew, without a snapshot.
        variables = {**os.environ, _VARIABLE: f"{_TRIES},{memory_fd},{message_fd},{sys.executable}"}
        os.execve(program, command_line(), variables)
    except OSError as error:
        os.close(message_fd)
        return f"{program}: {error.strerror}"


def start_anew(why: str = "") -> NoReturn:
    """Start this process, which continues from a snapshot, once more without it. ``why`` is what ``resume`` returns."""
    os.execve(sys.executable, command_line(), {**os.environ, _VARIABLE: why})


def command_line() -> list[bytes]:
    """Return this process's command line, interpreter and its flags included."""
    with open("/proc/self/cmdline", "rb") as file:
        return file.read().removesuffix(b"\0").split(b"\0")


def note_generators() -> None:
    """Note this process's random generators, which the processes of its snapshot have to seed."""
    import gc
    import random

    _generators[:] = [each for each in gc.get_objects() if type(each) is random.Random]
    if "ssl" in sys.modules:
        sys.modules["ssl"].RAND_bytes(1)  # OpenSSL takes milliseconds to make its own, and hardly any to seed it again


def start_resumed(message_fd: int, kept: Mapping[int, str]) -> list[str]:
    """Read what the process said that this one continues, and bring up to date what the snapshot has of old.

    ``kept`` are the numbers and paths of files that libraries keep open. Returns its arguments.
    """
    with open(message_fd, "rb") as file:
        file.seek(0)
        message = marshal.loads(file.read())
    environ: dict[str, str] = message["environ"]
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:  # to set one takes some microseconds
            os.environ[name] = value
    sys.path[:], sys.argv[:], sys.orig_argv[:] = message["path"], message["argv"], message["orig_argv"]
    sys.dont_write_bytecode = message["dont_write_bytecode"]
    if kept and (why := reopen(kept)) is not None:
        start_anew(why)
    try:
        with open("/proc/self/comm", "w") as comm:
            comm.write(message["name"].rstrip("\n"))
    except OSError:
        pass  # /proc is mounted for reading alone, and the name shows in ps
    time.tzset()
    if "tempfile" in sys.modules:
        # The folder is chosen by the environment, once. Names are random, but not if this process has the old one's id.
        vars(sys.modules["tempfile"]).update(tempdir=None, _name_sequence=None)
    if "logging" in sys.modules:  # %(relativeCreated)d counts from here
        logging: Any = sys.modules["logging"]
        logging._startTime = time.time_ns() if isinstance(logging._startTime, int) else time.time()
    if "multiprocessing.process" in sys.modules:
        vars(sys.modules["multiprocessing.process"])["ORIGINAL_DIR"] = _working_directory()  # for spawned processes
    for place, finder in list(sys.path_importer_cache.items()):
        if finder is None:  # there was no such folder
            del sys.path_importer_cache[place]
    _renew_signals()
    _reopen_streams(message["streams"])
    _renew_secrets()
    _renew_stacks()
    _renew_threads()
    arguments: list[str] = message["arguments"]
    return arguments


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None  # it was removed


def _renew_signals() -> None:
    """Handle signals as Python does when it starts. It leaves alone what the parent process has chosen to ignore."""
    import signal

    with open("/proc/self/status") as status:
        ignored = next((int(line.split()[1], 16) for line in status if line.startswith("SigIgn:")), 0)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if ignored >> (number - 1) & 1:
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) is not signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
    if not ignored >> (signal.SIGINT - 1) & 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    if "faulthandler" in sys.modules and (faults := sys.modules["faulthandler"]).is_enabled():
        faults.disable()
        faults.enable()


def _nature(stream: TextIO | None) -> tuple[str, str | None, bool, bool] | None:
    """Return how Python has opened a standard stream, which depends on a terminal, the locale, and variables."""
    if not isinstance(stream, io.TextIOWrapper):
        return None  # it is closed
    return stream.encoding, stream.errors, stream.line_buffering, stream.write_through


def _reopen_streams(natures: Sequence[tuple[str, str | None, bool, bool] | None]) -> None:
    """Open the standard streams as Python has opened those of the process that this one continues."""
    for number, (name, nature) in enumerate(zip(("stdin", "stdout", "stderr"), natures, strict=True)):
        stream = None
        if nature is not None:
            encoding, errors, line_buffering, write_through = nature
            file = open(number, "wb" if number else "rb", 0 if write_through else -1, closefd=False)  # noqa: SIM115
            stream = io.TextIOWrapper(file, encoding, errors, "\n", line_buffering, write_through)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _renew_secrets() -> None:
    """Make new what is random, which would otherwise be the same in all processes of a snapshot."""
    loaded = sys.modules
    for generator in _generators:
        generator.seed()
    if "torch" in loaded:
        loaded["torch"].default_generator.seed()
    if "numpy.random" in loaded:
        loaded["numpy.random"].seed()
    if "ssl" in loaded:
        loaded["ssl"].RAND_add(os.urandom(64), 64.0)
    if "multiprocessing.process" in loaded:
        loaded["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "opentelemetry.sdk.resources" in loaded:  # what tells instances apart in traces; it is made anew when needed
        vars(loaded["opentelemetry.sdk.resources"])["_service_instance_id"] = None
    if "transformers.utils.hub" in loaded:  # Hugging Face counts users by it
        vars(loaded["transformers.utils.hub"])["SESSION_ID"] = os.urandom(16).hex()


def _renew_stacks() -> None:
    """Let threads have stacks as large as this process's limit for its own, which libc reads when a program starts."""
    import ctypes
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_STACK)
    libc, attributes = ctypes.CDLL(None), (ctypes.c_char * 64)()
    if libc.pthread_getattr_default_np(attributes) == 0:
        stack_bytes = _UNLIMITED_STACK_BYTES if limit == resource.RLIM_INFINITY else limit // 4096 * 4096
        if libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(stack_bytes)) == 0:
            libc.pthread_setattr_default_np(attributes)


def _renew_threads() -> None:
    """Let torch use a thread for each core, as by default. It has counted those of the machine of the snapshot."""
    if "torch" in sys.modules and not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        torch = sys.modules["torch"]
        if torch.get_num_threads() != (cores := _cores()):
            torch.set_num_threads(cores)
            _set_openblas_threads(cores)


def _set_openblas_threads(count: int) -> None:
    """Set the number of threads of each OpenBLAS that is loaded: NumPy and SciPy have one of their own."""
    if "numpy" not in sys.modules:
        return
    import ctypes

    for library in map(ctypes.CDLL, (path for path in mapped_files() if "openblas" in path)):
        for name in _OPENBLAS_FUNCTIONS:
            if (function := getattr(library, name, None)) is not None:
                function(count)


def _cores() -> int:
    """Return the number of cores that this process may use. A core may have several CPUs (hyper-threads)."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as siblings:
                cores.add(siblings.read())
        except OSError:  # this sandbox does not show it
            cores.add(str(cpu))
    return len(cores)
