"""The memory that a second instance of the same model adds to the machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ...cli.progress import note
from ..process import pss_bytes
from ..result import Result
from .contestants import Question, Server, weights_mb
from .metrics import add


def measure_sharing(
    result: Result, servers: Sequence[Server], question: Question, *, runs: int, instances: int
) -> None:
    """Add rows of memory in MB: ``first_mb`` of the first instance, and ``added_mb``, which each further one adds.

    Both are PSS, which counts shared pages once over all instances. ``added_system_mb`` is the same as ``added_mb``,
    but from the machine's anonymous and shared memory. ``size_mb`` is the size of the ``weights``.
    """
    for server in servers:
        _measure_one(result, server, question, runs=runs, instances=instances)
    weights = weights_mb(question)
    add(result, "weights", "size_mb", [weights] if weights else [])


def _measure_one(result: Result, server: Server, question: Question, *, runs: int, instances: int) -> None:
    first, added, system = [], [], []
    for number in range(runs):
        with ExitStack() as stack:
            started, memory, used = [], [0.0], [_system_mb()]
            for _ in range(instances):
                started.append(stack.enter_context(server.start(question)))
                started[-1].completion(question.body)  # then all its weights have been read
                memory.append(sum(pss_bytes(instance.tree()) for instance in started) / 1e6)
                used.append(_system_mb())
        further = instances - 1
        first.append(memory[1])
        added.append((memory[-1] - memory[1]) / further)
        system.append((used[-1] - used[1]) / further)
        note(f"run {number + 1}: {server.name} takes {first[-1]:.0f} MB, each further one adds {added[-1]:.0f} MB")
    add(result, server.name, "first_mb", first)
    add(result, server.name, "added_mb", added)
    add(result, server.name, "added_system_mb", system)


def _system_mb() -> float:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(words[1]) for words in lines if words[0] in ("AnonPages:", "Shmem:")) / 1e3
