"""A process that continues from a snapshot is the saved one, in another process's place."""

from __future__ import annotations

import os
import platform
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from medusa_snapshot.resuming import MEMORY, place, resume

from .saved import Saved

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no snapshots here")

_THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"


def test_it_has_the_memory_of_the_saved_process_and_the_circumstances_of_its_own(tmp_path: Path) -> None:
    saved = Saved(
        tmp_path,
        """
        import os, sys, threading, time
        kept = {"numbers": list(range(100_000)), "pid": os.getpid()}
        def resumed(arguments):
            assert kept["numbers"][-1] == 99_999 and kept["pid"] != os.getpid()
            try:
                1 / 0
            except ZeroDivisionError as error:
                print(error)
            child = os.fork()
            if not child:
                os._exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            thread = threading.Thread(target=print, args=("thread",))
            thread.start()
            thread.join()
            print(arguments, sys.argv[1:], os.environ["HERE"], os.environ.get("THERE"), os.getcwd(), sys.stdin.read())
            print(abs(time.time() - float(arguments[0])) < 60, os.stat(int(arguments[1])).st_size)
        """,
        {"THERE": "1"},
    )
    assert saved.output == ""
    with open(tmp_path / "data", "w+") as file:
        file.write("12345")
        file.flush()
        number = file.fileno()
        options = {"cwd": "/usr", "input": "given", "pass_fds": (number,)}
        output = saved.resume(str(time.time()), str(number), "b", environ={"HERE": "é"}, **options)
    *_, words, last = lines = output.splitlines()
    assert lines[:3] == ["division by zero", "7", "thread"]
    assert words.endswith("'b'] é None /usr given")
    assert last == "True 5"


def test_its_heap_grows_and_shrinks(tmp_path: Path) -> None:
    saved = Saved(
        tmp_path,
        """
        import ctypes, os, random
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        libc.free.argtypes = (ctypes.c_void_p,)
        libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
        before = [libc.malloc(50_000) for _ in range(100)]  # at the end of the heap
        def resumed(arguments):
            for round in range(5):
                held = before if not round else []
                for _ in range(2000):
                    size = random.choice((100, 5_000, 100_000))
                    held.append(libc.malloc(size))
                    libc.memset(held[-1], 1, size)
                random.shuffle(held)
                for one in held:
                    libc.free(one)
                libc.malloc_trim(0)
            print("grown and shrunk")
        """,
    )
    assert saved.resume() == "grown and shrunk\n"


def test_its_stack_is_one_piece(tmp_path: Path) -> None:
    """libc finds the size of the first thread's stack in /proc/self/maps, for runtimes such as those of Go and Java."""
    saved = Saved(
        tmp_path,
        """
        import ctypes
        def resumed(arguments):
            libc, attributes, at, size = ctypes.CDLL(None), (ctypes.c_char * 64)(), ctypes.c_void_p(), ctypes.c_size_t()
            libc.pthread_self.restype = ctypes.c_ulong
            assert libc.pthread_getattr_np(ctypes.c_ulong(libc.pthread_self()), attributes) == 0
            assert libc.pthread_attr_getstack(attributes, ctypes.byref(at), ctypes.byref(size)) == 0
            print(size.value > 7 << 20)
        """,
    )
    assert saved.resume() == "True\n"


def test_stacks_of_threads_are_as_large_as_the_limit_of_the_process_that_continues(tmp_path: Path) -> None:
    saved = Saved(
        tmp_path,
        """
        import ctypes
        def resumed(arguments):
            libc, attributes, size = ctypes.CDLL(None), (ctypes.c_char * 64)(), ctypes.c_size_t()
            assert libc.pthread_getattr_default_np(attributes) == 0
            assert libc.pthread_attr_getstacksize(attributes, ctypes.byref(size)) == 0
            print(size.value >> 10)
        """,
    )
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    for soft in (3 << 20, 5 << 20):
        given = saved.resume(preexec_fn=lambda soft=soft: resource.setrlimit(resource.RLIMIT_STACK, (soft, hard)))
        assert given == f"{soft >> 10}\n"


def test_functions_of_the_kernels_library_are_found_later(tmp_path: Path) -> None:
    saved = Saved(
        tmp_path,
        """
        import ctypes, time
        def resumed(arguments):
            libc = ctypes.CDLL(None)  # libc chooses these functions when they are looked up for the first time
            seconds = (ctypes.c_long * 2)()
            for name in ("time", "gettimeofday"):
                getattr(libc, name)(seconds, None)
                print(name, abs(time.time() - seconds[0]) < 60)
        """,
    )
    assert saved.resume() == "time True\ngettimeofday True\n"


def test_a_mapping_may_begin_with_an_address_of_the_kernels_library(tmp_path: Path) -> None:
    saved = Saved(
        tmp_path,
        """
        import ctypes, mmap
        with open("/proc/self/maps") as maps:
            vdso = next(int(line.split("-")[0], 16) for line in maps if "[vdso]" in line)
        room = mmap.mmap(-1, 3 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(room)) + mmap.PAGESIZE
        ctypes.c_uint64.from_address(begin).value = vdso
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin - mmap.PAGESIZE), mmap.PAGESIZE, 0)
        def resumed(arguments):
            print(ctypes.c_uint64.from_address(begin).value == vdso)
        """,
    )
    assert saved.resume() == "True\n"


def test_a_description_of_the_processor_may_be_left_open(tmp_path: Path) -> None:
    saved = Saved(
        tmp_path,
        """
        import os
        left = os.open("/sys/devices/system/cpu/possible", os.O_RDONLY)
        def resumed(arguments):
            try:
                print(os.readlink(f"/proc/self/fd/{left}"))
            except FileNotFoundError:
                print("closed")
        """,
    )
    assert (saved.output, saved.resume()) == ("", "closed\n")


def test_what_is_random_differs_in_each(tmp_path: Path) -> None:
    saved = Saved(
        tmp_path,
        """
        import multiprocessing, os, random, ssl, tempfile, uuid
        ssl.RAND_bytes(8)  # so that its generator has a state
        another = random.Random()
        names = tempfile._get_candidate_names()
        next(names)
        def resumed(arguments):
            names._rng_pid = os.getpid()  # as in containers, whose processes have the same ids
            print(next(tempfile._get_candidate_names()))
            print(random.random(), another.random(), os.urandom(8), ssl.RAND_bytes(8), uuid.uuid4())
            print(bytes(multiprocessing.current_process().authkey))
        """,
    )
    first, second = saved.resume(), saved.resume()
    assert not set(first.split()) & set(second.split())


def test_its_log_counts_from_its_own_start(tmp_path: Path) -> None:
    saved = Saved(
        tmp_path,
        """
        import logging
        before = logging._startTime
        def resumed(arguments): print(logging._startTime > before, type(logging._startTime) is type(before))
        """,
    )
    assert saved.resume() == "True True\n"


def test_memory_that_a_child_finds_empty_is_empty(tmp_path: Path) -> None:
    """libc and OpenSSL keep the state of random numbers there, so that two processes never have the same."""
    saved = Saved(
        tmp_path,
        """
        import mmap, os
        MADV_WIPEONFORK = 18
        secret = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        secret.madvise(MADV_WIPEONFORK)
        secret[:6] = b"secret"
        def resumed(arguments):
            found = bytes(secret[:6])
            secret[:6] = b"secret"
            child = os.fork()
            if not child:
                os._exit(secret[0])
            print(found, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    )
    assert saved.resume() == "b'\\x00\\x00\\x00\\x00\\x00\\x00' 0\n"


def test_signals_are_those_of_a_new_process(tmp_path: Path) -> None:
    saved = Saved(
        tmp_path,
        """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: print("the handler of the saved process"))
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        def resumed(arguments):
            print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP), flush=True)
            try:
                os.write(os.pipe()[1], b"")
                reading, writing = os.pipe()
                os.close(reading)
                os.write(writing, b"x")
            except BrokenPipeError:
                print("ignored", flush=True)
            time.sleep(60)
        """,
    )
    process = subprocess.Popen(
        saved.command("resume"), stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "0 1\n"
    assert process.stdout.readline() == "ignored\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    process.stdout.close()


def test_if_memory_cannot_be_mapped_the_process_starts_without_it(tmp_path: Path) -> None:
    saved = Saved(
        tmp_path,
        """
        import mmap
        kept = mmap.mmap(-1, 3 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        def resumed(arguments):
            print("resumed")
        """,
    )
    assert saved.resume() == "resumed\n"
    limited = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)); "
    command = [sys.executable, "-c", limited + "os.execv(sys.argv[1], sys.argv[1:])", *saved.command("resume")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.startswith("plain its memory cannot be mapped")


_WITHOUT_OPEN = """
import ctypes, os, struct, sys
code = ((0x20, 0, 0, 0), (0x15, 0, 1, 2), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000))  # EPERM for call 2
filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(filters)))
prctl = ctypes.CDLL(None).prctl
if prctl(38, 1, 0, 0, 0) or prctl(22, 2, program, 0, 0):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
    print("resumed, for this kernel takes no seccomp filter")
    sys.exit()
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_no_system_call_is_needed_that_filters_may_leave_out(tmp_path: Path) -> None:
    """libc opens files with openat. So lists of the calls that a program was seen to use do not have open."""
    saved = Saved(tmp_path, "def resumed(arguments): print('resumed')\n")
    command = [sys.executable, "-c", _WITHOUT_OPEN, *saved.command("resume")]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.startswith("resumed")


def test_nothing_of_the_new_process_is_replaced(tmp_path: Path) -> None:
    """Without random addresses, the kernel's library and the stack are where those of the saved process were."""
    saved = Saved(tmp_path, "def resumed(arguments): print('resumed')\n")
    without_randomness = ["setarch", "-R", *saved.command("save")]
    subprocess.run(without_randomness, check=True, stdout=subprocess.PIPE)
    done = subprocess.run(["setarch", "-R", *saved.command("resume")], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.startswith("plain its memory cannot be mapped")
    assert saved.resume() == "resumed\n"


_STREAMS = """
    import sys
    def resumed(arguments):
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            print(stream and (stream.encoding, stream.errors, stream.line_buffering, stream.write_through))
        print(sys.dont_write_bytecode)
        sys.exit()
"""


@pytest.mark.parametrize(
    "environ", [{}, {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}, {"PYTHONIOENCODING": "latin-1:replace"}]
)
def test_its_standard_streams_are_those_of_a_new_process(environ: dict[str, str], tmp_path: Path) -> None:
    plain = dict.fromkeys(("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"), "")
    saved = Saved(tmp_path, _STREAMS, environ | plain)
    code = textwrap.dedent(_STREAMS) + "resumed([])"
    command, given = [sys.executable, "-c", code], {**os.environ, **plain, **environ}
    expected = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert saved.resume(environ=plain | environ) == expected


def test_a_folder_of_the_import_path_may_appear_later(tmp_path: Path) -> None:
    later = tmp_path / "later"
    environ = {"PYTHONPATH": str(later)}
    saved = Saved(tmp_path, "def resumed(arguments):\n    import a_later_module; print(a_later_module.x)\n", environ)
    later.mkdir()
    (later / "a_later_module.py").write_text("x = 5")
    assert saved.resume(environ=environ) == "5\n"


_FAULTS = {"PYTHONFAULTHANDLER": "1"}


def test_faults_are_still_shown(tmp_path: Path) -> None:
    code = "import os, signal\ndef resumed(arguments): os.kill(os.getpid(), signal.SIGSEGV)\n"
    saved = Saved(tmp_path, code, _FAULTS)
    done = saved._run("resume", (), _FAULTS)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stdout


def test_processes_may_save_at_the_same_time(tmp_path: Path) -> None:
    saved = Saved(tmp_path, _TRIVIAL)
    savers = [
        subprocess.Popen(saved.command("save"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(6)
    ]
    assert [saver.communicate()[0] for saver in savers] == [""] * 6
    assert saved.resume() == "resumed\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["body.py", saved.place.name])


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.touch()
    assert resume(str(folder), "test", []) == f"{folder} cannot be read: Not a directory"
    assert resume(str(tmp_path / "none"), "test", []) is None


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / f".new-{Path(place(str(tmp_path), 'test')).name}-4194399"
    left.mkdir()
    Saved(tmp_path, "def resumed(arguments): ...\n")
    assert not left.exists()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (_THREAD, "one thread, found 2"),
        ("kept = open('/dev/null')", "without open files, found /dev/null"),
        (
            "import mmap, tempfile\nwith tempfile.TemporaryFile() as file:\n"
            "    file.truncate(4096)\n    kept = mmap.mmap(file.fileno(), 4096)",
            "without open files, found /tmp",
        ),
        (
            "import mmap, os, tempfile\nwith tempfile.TemporaryFile() as file:\n    file.truncate(4096)\n"
            "    import ctypes; libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p\n"
            "    libc.mmap(None, ctypes.c_size_t(4096), 3, 1, file.fileno(), ctypes.c_long(0))",
            "it shares memory with others",
        ),
    ],
)
def test_a_process_that_cannot_be_saved_says_why(code: str, why: str, tmp_path: Path) -> None:
    saved = Saved(tmp_path, code)
    assert why in saved.output
    assert [path.name for path in tmp_path.iterdir()] == ["body.py"]


def test_memory_that_it_shares_with_its_children_is_each_processs_own(tmp_path: Path) -> None:
    saved = Saved(
        tmp_path,
        """
        import mmap, os
        shared = mmap.mmap(-1, 4 * mmap.PAGESIZE)
        shared[:5] = b"saved"
        def resumed(arguments):
            found = bytes(shared[:5])
            if not (child := os.fork()):
                shared[:5] = b"child"
                os._exit(0)
            os.waitpid(child, 0)
            print(found, bytes(shared[:5]))
        """,
    )
    assert [saved.resume(), saved.resume()] == ["b'saved' b'child'\n"] * 2


def test_paths_in_folders_of_the_user_are_those_of_the_process_that_continues(tmp_path: Path) -> None:
    (modules := tmp_path / "modules").mkdir()
    (modules / "of_user.py").write_text(
        "import getpass, os, pathlib, tempfile\nCACHE = os.path.expanduser('~/.cache')\n"
        "BUILDS = f'{tempfile.gettempdir()}/builds_{getpass.getuser()}'\n"
        "class Loader:\n    place = pathlib.Path.home() / 'data'\n"
        "    def load(self, number=1, place=os.path.expanduser('~/loaded')): return place\n"
        "    def __init__(self): self.cache = os.path.expanduser('~/cache')\n"
        "VARIABLES = {'userbase': os.path.expanduser('~/.local')}\nLOADER = Loader()\n"
    )
    path = os.pathsep.join(filter(None, (str(modules), os.environ.get("PYTHONPATH"))))
    saved = Saved(
        tmp_path,
        """
        from medusa_snapshot.folders import NotedFolders
        with NotedFolders() as folders:
            import of_user
        def resumed(arguments):
            folders.renew()
            print(of_user.CACHE, of_user.Loader.place, of_user.VARIABLES['userbase'], of_user.LOADER.load())
            print(of_user.LOADER.cache, of_user.BUILDS, type(of_user.Loader.place).__name__)
        """,
        {"PYTHONPATH": path, "HOME": "/home/of-the-saver"},
    )
    for home, temporary, user in (("/root", "/tmp", "one"), ("/home/another", str(tmp_path), "another")):
        environ = {"PYTHONPATH": path, "HOME": home, "TMPDIR": temporary, "LOGNAME": user}
        expected = f"{home}/.cache {home}/data {home}/.local {home}/loaded\n"
        expected += f"{home}/cache {temporary}/builds_{user} PosixPath\n"
        assert saved.resume(environ=environ) == expected


def test_processes_that_it_spawns_are_in_its_working_directory(tmp_path: Path) -> None:
    saved = Saved(
        tmp_path,
        """
        import multiprocessing, os
        def resumed(arguments):
            pool = multiprocessing.get_context("spawn").Pool(1)
            print(pool.apply(os.getcwd))
            pool.terminate()
            pool.join()
        """,
    )
    folder = tmp_path / "here"
    folder.mkdir()
    assert saved.resume(cwd=folder) == f"{folder}\n"


def test_numpy_draws_other_numbers_in_each_process(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    code = "import numpy.random\ndef resumed(arguments): print(numpy.random.random())\n"
    saved = Saved(tmp_path, code, {"OPENBLAS_NUM_THREADS": "1"})
    assert saved.resume() != saved.resume()


_TRIVIAL = "import colorsys\ndef resumed(arguments): print('resumed')\n"


def test_without_a_snapshot_there_is_no_reason(tmp_path: Path) -> None:
    saved = Saved(tmp_path, _THREAD)
    assert saved.resume() == "plain None\n"


def test_of_a_file_that_is_mapped_only_the_pages_that_were_written_to_are_saved(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old" * (4 << 20))  # 12 MiB
    code = """
    import ctypes, os
    libc = ctypes.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_long] * 4
    opened = os.open(FILE, os.O_RDONLY)
    mapped = (ctypes.c_char * (12 << 20)).from_address(libc.mmap(None, 12 << 20, 3, 2, opened, 0))
    os.close(opened)
    mapped[0:3] = mapped[3 << 20:(3 << 20) + 3] = mapped[(12 << 20) - 3:12 << 20] = b"new"
    resumed = lambda _: print(mapped[0:6], mapped[3 << 20:(3 << 20) + 6], mapped.raw.count(b"old"), mapped[-3:])
    """
    saved = Saved(tmp_path, code.replace("FILE", repr(str(tmp_path / "file"))))
    assert saved.resume() == f"b'newold' b'newold' {(4 << 20) - 3} b'new'\n"
    assert (saved.place / MEMORY).stat().st_size < 10 << 20
