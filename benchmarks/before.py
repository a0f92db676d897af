"""This checkout's cold start, imports and fetch in turn with those of an earlier one.

    git worktree add before REVISION && make -C before setup
    python -m benchmarks.before before/.venv/bin/python --model out/llama-57m

Each pair runs one after the other, and the order changes with each pair. CPU seconds are those of all processes, and
change less than seconds where others use the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from medusa_adapters.bench.bytecode import compile_packages
from medusa_adapters.bench.contestants import Medusa, Question
from medusa_adapters.bench.process import Process, cpu_s
from medusa_adapters.bench.result import Result, Target, targets_table
from medusa_adapters.bench.served_instance import medusa_command
from medusa_runtime.errors import ConfigError, MedusaError

from benchmarks import command_line
from benchmarks.origin import VARIANTS, Origin

_MOST_TIMES = 1.02
_JUDGED = ("ttft_s", "all_cpu_s", "wall_s", "cpu_s")

Sample = dict[str, float]


def main() -> int:
    arguments = parsed()
    folder: Path = arguments.model.resolve()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model={folder}: expected a folder with a checkpoint, found no config.json")
    pythons = {"now": sys.executable, "before": arguments.python}
    for python in pythons.values():
        compile_packages(python)
    result = Result()
    targets = compare(result, "start", pythons, lambda python: start(python, str(folder)), arguments.pairs)
    targets += compare(result, "import", pythons, partial(command, arguments=("--version",)), arguments.pairs)
    with (
        tempfile.TemporaryDirectory(prefix="m") as scratch,
        Origin(folder.parent, Path(scratch), VARIANTS[0]) as origin,
    ):
        fetch = partial(command, arguments=("fetch", f"{origin.url}/{folder.name}"))
        targets += compare(result, "fetch", pythons, fetch, arguments.pairs)
    print(result.table(), targets_table(targets), sep="\n\n")
    if arguments.json is not None:
        result.write(arguments.json)
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", metavar="PYTHON", help="the interpreter of the earlier checkout's environment")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the checkpoint to start with")
    parser.add_argument("--pairs", type=int, default=10, metavar="N", help="of each, after one that warms caches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows to this file")
    return parser.parse_args()


def compare(
    result: Result, what: str, pythons: dict[str, str], sample: Callable[[str], Sample], pairs: int
) -> list[Target]:
    """Add the rows of both, and return the medians of the pairs' ratios, of all processes together."""
    taken: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in pythons}
    for number in range(pairs + 1):
        for name in pythons if number % 2 else reversed(pythons):
            for metric, value in sample(pythons[name]).items():
                taken[name][metric].append(value)
    targets = []
    for metric in taken["now"]:
        now, before = (taken[name][metric][1:] for name in pythons)
        for name, values in (("now", now), ("before", before)):
            result.add(f"{what}, {name}", metric, "s", values)
        if metric in _JUDGED:
            ratio = statistics.median(a / b for a, b in zip(now, before, strict=True))
            targets.append(Target(f"{what}: {metric}, times before", ratio, _MOST_TIMES, at_least=False))
    return targets


def start(python: str, folder: str) -> Sample:
    """A cold start to its first answer: seconds, and CPU seconds of each process until then."""
    question = Question(folder, folder, "The quick brown fox", max_tokens=1)
    with Medusa(python=python).start(question) as instance:
        answer = instance.completion(question.body)
        used: Sample = defaultdict(float)
        for pid, seconds in cpu_s(instance.tree()).items():
            with suppress(OSError):
                used[Path(f"/proc/{pid}/comm").read_text().strip() + "_cpu_s"] += seconds
    first_token_s = (answer.first_token_ns - instance.started_ns) / 1e9
    return {"ttft_s": first_token_s, "all_cpu_s": sum(used.values()), **used}


def command(python: str, arguments: tuple[str, ...]) -> Sample:
    """A command of medusa's to its end: seconds, and CPU seconds."""
    with Process([*medusa_command(python), *arguments], {"MEDUSA_NODE_SOCKET": "none"}) as process:
        _, status, usage = os.wait4(process.pid, 0)
        seconds = process.since_start_s()
        process.process.returncode = os.waitstatus_to_exitcode(status)
        if status:
            raise MedusaError(process.output())
        return {"wall_s": seconds, "cpu_s": usage.ru_utime + usage.ru_stime}


if __name__ == "__main__":
    command_line.run(main)
