"""An invocation trace against real processes: each invocation is a cold inference in a container of its own."""

from __future__ import annotations

import csv
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from medusa_adapters.bench.result import Result

from benchmarks.cicada.runner import Container
from benchmarks.cicada.sample import Request

TRACE = Path(__file__).parent / "traces" / "azure_llm_2023_conv.csv"
# The trace is a whole cluster's, four invocations a second; one machine gets its pattern at this mean distance.
_MEAN_DISTANCE_S = 2.0


class Invocation(NamedTuple):
    """A request of the trace; ``at`` is in seconds after the replay's start."""

    at: float
    model: str


def invocations(models: Sequence[str], count: int, mean_distance_s: float = _MEAN_DISTANCE_S) -> list[Invocation]:
    """The first ``count`` of the trace, stretched; each is of a model drawn at random, the same in every replay."""
    with TRACE.open() as file:
        times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in csv.DictReader(file)][:count]
    seconds = [(moment - times[0]).total_seconds() for moment in times]
    stretch = mean_distance_s * (len(seconds) - 1) / seconds[-1] if len(seconds) > 1 else 1.0
    draw = random.Random(0)
    return [Invocation(second * stretch, draw.choice(models)) for second in seconds]


def replay(
    result: Result,
    folders: Mapping[str, Path],
    strategies: Sequence[str],
    count: int,
    scratch: Path,
    mean_distance_s: float = _MEAN_DISTANCE_S,
) -> None:
    """Adds rows ``trace/<strategy>``: percentiles of the time from arrival to output, waiting for a core included."""
    wanted = invocations(list(folders), count, mean_distance_s)
    for strategy in strategies:
        print(f"  trace/{strategy}: starting {len(wanted)} containers first", file=sys.stderr, flush=True)
        seconds = _replay(wanted, folders, strategy, scratch)
        cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else seconds * 99
        for percent in (50, 95, 99):
            result.add(f"trace/{strategy}", f"p{percent}_s", "s", [cuts[percent - 1]])
        print(f"  trace/{strategy}: {len(seconds)} invocations, median {cuts[49]:.3f} s", file=sys.stderr, flush=True)


def _replay(wanted: Sequence[Invocation], folders: Mapping[str, Path], strategy: str, scratch: Path) -> list[float]:
    """Containers are up before the first invocation (Cicada §4.1); as many run at a time as there are cores."""
    cores = len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        containers = []
        for _ in wanted:
            containers.append(stack.enter_context(Container(scratch, strategy)))
            if len(containers) % cores == 0:
                containers[-1].wait_ready()
        for number, container in enumerate(containers, 1):
            if number % cores:
                container.wait_ready()
        pool = stack.enter_context(ThreadPoolExecutor(cores))
        began = time.monotonic()

        def invoke(invocation: Invocation, container: Container) -> float:
            container.infer(Request(invocation.model, strategy, str(folders[invocation.model])))
            seconds = time.monotonic() - began - invocation.at
            container.close()  # the models of all of them together would be more than a machine's memory
            return seconds

        running = []
        for invocation, container in zip(wanted, containers, strict=True):
            time.sleep(max(0.0, began + invocation.at - time.monotonic()))
            running.append(pool.submit(invoke, invocation, container))
        return [one.result() for one in running]
