"""Tries a grammar in a process of its own, within limits, before the process that keeps all grammars compiles it.

A grammar comes from a client. A few kilobytes can make the library compute for minutes, take gigabytes or overflow its
stack. That would end the process, and with it the grammars of all other clients.

A grammar that passes is compiled a second time, because the library cannot pass a compiled grammar to another process.
For usual schemas this takes one to two milliseconds of CPU; the fork for the trial alone takes five.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from ...process import die_with_parent, wait_readable
from ...process_limits import as_limit_error, used_bytes

CPU_S = 3.0
MEMORY_BYTES = 256 << 20
_FORKING = threading.Lock()  # a child of another thread's would keep the pipe open
_LEAST_CPUS = 1 / 20  # what a trial gets of a CPU on a busy machine, or is given up, before the engine gives up
_MOST_CHARACTERS = 2000
_PAGE_BYTES = resource.getpagesize()


class Trial(NamedTuple):
    """The result of a trial: what is wrong with the grammar, or "", and how much memory it takes.

    ``slow`` is True if a trial with more time may end otherwise. ``final`` is False if another one with the same limits
    may, because this one had not ended in time: it was given no CPU time, or a lock was held when it was forked. Or
    there was no room for a process.
    """

    fault: str
    size_bytes: int
    final: bool = True
    slow: bool = False


def try_grammar(make: Callable[[], Any], cpu_s: float = CPU_S) -> Trial:
    """Make a matcher, with ``make``, and its first mask in a forked process with limits on CPU time and memory."""
    parent = os.getpid()
    with _FORKING:
        reading, writing = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            return Trial(f"it cannot be tried now: {as_limit_error(error) or error}", 0, final=False)
        if not pid:
            try:
                die_with_parent(parent)
                os.write(writing, json.dumps(_try_grammar(make, cpu_s)).encode())
            finally:
                os._exit(0)
        os.close(writing)
    wait_s = cpu_s / _LEAST_CPUS
    in_time = wait_readable(reading, wait_s)
    if not in_time:
        os.kill(pid, signal.SIGKILL)
    with open(reading, "rb") as pipe:
        output = pipe.read()
    status = os.waitpid(pid, 0)[1]
    if not output and not in_time:
        return Trial(f"its trial has not ended within {wait_s:g} s on this busy machine; try again", 0, False, True)
    if not output:
        limits = f"{cpu_s:g} s of CPU time or {MEMORY_BYTES >> 20} MB"
        text = f"it takes more than {limits} to prepare; expected a simpler one"
        return Trial(text, 0, slow=os.WTERMSIG(status) == signal.SIGPROF)
    return Trial(*json.loads(output))


def _try_grammar(make: Callable[[], Any], cpu_s: float) -> Trial:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends this process; RLIMIT_CPU counts whole seconds
    resident, limit = _resident_bytes(), used_bytes(resource.RLIMIT_AS) + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        matcher = make()
        if not matcher.is_error():
            matcher.compute_bitmask()
        fault = matcher.get_error()
    except BaseException as error:  # noqa: BLE001 - the library's panics are no Exceptions
        fault = str(error) or type(error).__name__
    return Trial(fault[:_MOST_CHARACTERS], max(_resident_bytes() - resident, 0))


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * _PAGE_BYTES
