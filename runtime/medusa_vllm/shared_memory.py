"""The names of the shared memory in which vLLM's processes exchange messages.

vLLM removes some of them at an orderly end, and others never. Killed processes leave theirs behind in /dev/shm, which a
container may share with the next one.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

QUIET = "ignore::UserWarning:multiprocessing.resource_tracker"  # Python warns of names that are not there any more
_QUEUE, _COLLECTIVE = (re.compile(rf" (/dev/shm/{name}\S+)$", re.MULTILINE) for name in ("psm_", "vllm_dist_"))


def remove_names(pids: Iterable[int]) -> None:
    """Remove the names of queues that at least two of these processes, which are the caller's, have opened.

    The memory itself stays until all of them have ended, in whatever way.
    """
    opened = Counter(path for pid in pids for path in _mapped(_QUEUE, pid))
    _unlink(path for path, processes in opened.items() if processes > 1)


def remove_names_of_collectives() -> None:
    """Remove the names of the memory for sums over ranks, in a rank. All have opened it before they load weights."""
    _unlink(_mapped(_COLLECTIVE, os.getpid()))


def remove_names_of_ranks(executor: Any) -> None:
    """Remove the names that vLLM's executor and its ranks, if they are processes of their own, have opened."""
    ranks = [worker.proc.pid for worker in getattr(executor, "workers", ()) if hasattr(worker, "proc")]
    if ranks:
        remove_names([os.getpid(), *ranks])


def _mapped(name: re.Pattern[str], pid: int) -> set[str]:
    with suppress(OSError):  # it has ended
        return set(name.findall(Path(f"/proc/{pid}/maps").read_text()))
    return set()


def _unlink(paths: Iterable[str]) -> None:
    for path in paths:
        with suppress(OSError):  # another rank has done it
            Path(path).unlink()


__all__ = ["QUIET", "remove_names", "remove_names_of_collectives", "remove_names_of_ranks"]
