"""The system's, torch's and the loader's errors about a limit, in words that say which one and how to raise it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from medusa_runtime.process_limits import as_limit_error

NO_MAP = "libtorch_cpu.so: failed to map segment from shared object"
WITHOUT_MEMFD = """
import ctypes, platform, struct, sys
call = {"x86_64": 319, "aarch64": 279}[platform.machine()]
code = ((0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000))  # EPERM
filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(filters)))
prctl = ctypes.CDLL(None).prctl
if prctl(38, 1, 0, 0, 0) or prctl(22, 2, program, 0, 0):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
    sys.exit(77)
from medusa_adapters.cli.main import main
sys.exit(main())
"""
TORCH = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "there is no memory left: address space unlimited kB"),
        (MemoryError(), "there is no memory left"),
        (RuntimeError(TORCH), "there is no memory left"),
        (ImportError(NO_MAP), "there is no memory left"),
        (OSError(errno.ENOSPC, "No space left on device", "/f"), "no room left for /f"),
        (OSError(errno.EFBIG, "File too large"), "no file may be larger than unlimited kB (ulimit -f)"),
        (RuntimeError("can't start new thread"), "or one of the container (pids); raise it"),
    ],
)
def test_an_error_about_a_limit_names_it(error: Exception, said: str) -> None:
    found = as_limit_error(error)
    assert found is not None
    assert said in str(found)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOENT, "No such file"), RuntimeError("mat1 and mat2"), ImportError("No module named 'x'")]
)
def test_other_errors_are_about_no_limit(error: Exception) -> None:
    assert as_limit_error(error) is None


THREADS = """
import resource, threading
from medusa_runtime.process_limits import as_limit_error
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20),) * 2)
try:
    threading.Thread(target=int).start()
except RuntimeError as error:
    print(as_limit_error(error))
"""


def test_a_thread_without_address_space_is_not_laid_to_the_number_of_processes_alone() -> None:
    found = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True).stdout
    assert "kB of address space (ulimit -v); raise it" in found


@pytest.mark.parametrize("command", [["serve", "--model", "x"], ["node", "--socket", "/nowhere/x"], ["fetch", "x"]])
def test_a_forbidden_memfd_create_is_named(command: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMFD, *command], capture_output=True, text=True, check=False, timeout=60,
        cwd=tmp_path,
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip("this kernel takes no seccomp filter")
    assert done.stderr.startswith("medusa: memfd_create is forbidden here; allow this system call"), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() or not shutil.which("unshare"), reason="needs root and unshare to take /proc away")
@pytest.mark.parametrize("command", [["serve", "--model", "x"], ["snapshot", "--out", "x"]])
def test_a_container_without_proc_is_told_so(command: list[str], tmp_path: Path) -> None:
    script = 'mount -t tmpfs tmpfs /proc; exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-m", "medusa_adapters.cli.main", *command],
        capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path,
    )  # fmt: skip
    assert done.stderr.startswith("medusa: expected Linux's /proc, found none; mount it"), done.stderr
    assert len(done.stderr.splitlines()) == 1
