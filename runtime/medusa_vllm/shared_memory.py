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
_MAPPED = re.compile(r" (/dev/shm/(?:psm_|vllm_dist_)\S+)$", re.MULTILINE)


def remove_names(pids: Iterable[int]) -> None:
    """Remove the names that at least two of these processes, which are the caller's, have opened.

    The memory itself stays until all of them have ended, in whatever way.
    """
    opened: Counter[str] = Counter()
    for pid in pids:
        with suppress(OSError):
            opened.update(set(_MAPPED.findall(Path(f"/proc/{pid}/maps").read_text())))
    for path, processes in opened.items():
        if processes > 1:
            with suppress(OSError):
                Path(path).unlink()


def remove_names_of_ranks(executor: Any) -> None:
    """Remove the names that vLLM's executor and its ranks, if they are processes of their own, have opened."""
    ranks = [worker.proc.pid for worker in getattr(executor, "workers", ()) if hasattr(worker, "proc")]
    if ranks:
        remove_names([os.getpid(), *ranks])


__all__ = ["QUIET", "remove_names", "remove_names_of_ranks"]
