"""The system's, torch's and the loader's errors about a limit, in words that say which one and how to raise it."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest
from medusa_runtime.resource_limits import as_limit_error

NO_MAP = "libtorch_cpu.so: failed to map segment from shared object"
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
from medusa_runtime.resource_limits import as_limit_error
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
