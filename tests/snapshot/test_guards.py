"""Pages that nobody may touch, of which glibc 2.42 makes the ends of threads' stacks."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from .saved import Saved

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no snapshots here")


def test_they_are_guards_again_and_their_neighbours_keep_their_content(tmp_path: Path) -> None:
    saved = Saved(
        tmp_path,
        """
        import ctypes, mmap, os, signal
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        place = libc.mmap(None, ctypes.c_size_t(8 * 4096), 3, 0x22, -1, ctypes.c_long(0))
        ctypes.memset(place, 7, 8 * 4096)
        for page in (2, 3, 6):
            if libc.madvise(ctypes.c_void_p(place + page * 4096), ctypes.c_size_t(4096), 102):
                print("no guards")
        def resumed(arguments):
            for page in range(8):
                child = os.fork()
                if not child:
                    ctypes.memset(place + page * 4096 + 1, 1, 1)
                    os._exit(ctypes.string_at(place + page * 4096, 1)[0])
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), end=" ")
        """,
    )
    if saved.output == "no guards\n" * 3:
        pytest.skip("this kernel has no such pages")
    assert (saved.output, saved.resume()) == ("", "7 7 -11 -11 7 7 -11 7 ")
