"""Sleeping on a word of a region until another process has changed it."""

from __future__ import annotations

import mmap
import os
import time

from medusa_runtime.region.pages import address_of
from medusa_runtime.region.wake import wait_for_change, wake_all


def test_a_sleeper_is_woken_by_the_process_that_changes_the_word() -> None:
    descriptor = os.memfd_create("word")
    os.ftruncate(descriptor, mmap.PAGESIZE)
    words = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("Q")
    read_only = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ))
    pid = os.fork()
    if not pid:
        time.sleep(0.1)  # most likely, the other one sleeps by now; if not, it must not begin to
        words[1] = 5
        wake_all(address_of(words) + 8)
        os._exit(0)
    began = time.monotonic()
    while words[1] == 0:
        wait_for_change(address_of(read_only) + 8, 0, 20.0)
    assert time.monotonic() - began < 10.0
    os.waitpid(pid, 0)


def test_who_comes_late_does_not_sleep_and_nobody_sleeps_for_longer_than_asked() -> None:
    words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")
    words[0] = (7 << 32) + 3
    began = time.monotonic()
    wait_for_change(address_of(words), 2, 20.0)
    assert time.monotonic() - began < 10.0
    wait_for_change(address_of(words), 3, 0.05)
    assert time.monotonic() - began < 10.0
