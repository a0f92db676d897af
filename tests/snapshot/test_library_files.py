"""Files that libraries keep open, which are open under the same numbers in processes that continue."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from .saved import Saved

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no snapshots here")

# libffi keeps its file open, or does not: its builds differ.
_KEEPING = """
    import ctypes, os, re
    with open("/proc/self/maps") as maps:
        library = re.search(r"/.*/libc\\.so.*", maps.read()).group()
    opened = os.open(library, os.O_RDONLY)
    os.dup2(opened, 230)
    os.close(opened)
    def resumed(arguments):
        print(os.readlink("/proc/self/fd/230") == library, os.get_inheritable(230))
        print(sum(ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)() for _ in range(3)))
        held = [ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda n, add=add: n + add) for add in range(2000)]
        print(sum(one(1) for one in held))
    """


def test_they_are_open_under_the_same_numbers(tmp_path: Path) -> None:
    saved = Saved(tmp_path, _KEEPING)
    assert saved.output == ""
    assert saved.resume().splitlines() == ["True False", "3", str(sum(range(1, 2001)))]


def test_where_a_number_is_taken_the_process_starts_without_the_snapshot(tmp_path: Path) -> None:
    saved = Saved(tmp_path, _KEEPING)
    output = saved.resume(close_fds=False, preexec_fn=lambda: os.dup2(1, 230))
    assert output.startswith("plain it needs the descriptor 230 for /")
    assert "which is taken or above the limit for open files" in output
