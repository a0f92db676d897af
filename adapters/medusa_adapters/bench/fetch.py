"""`medusa bench fetch`: how fast a checkpoint comes from its store into a new region, and what it costs."""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time

from medusa_runtime.errors import ConfigError, MedusaError

from ..cli.flags import add_model, model_argument, output_file
from ..cli.progress import note
from .process import Process
from .result import Result

NAME = "medusa"
METRICS = {"fetch_s": "s", "mb_per_s": "MB/s", "cpu_s": "s/GB"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="fetches, each by a process of its own")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write machine and rows to this file")


def run(arguments: argparse.Namespace) -> int:
    """Print the medians. Raises MedusaError, with the output of the fetching process, if that fails."""
    model = model_argument(arguments)
    if not model:
        raise ConfigError("expected a checkpoint: medusa bench fetch URL, or --model URL")
    if arguments.runs < 1:
        raise ConfigError(f"--runs={arguments.runs} cannot be used: expected a whole number above 0")
    samples: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for number in range(arguments.runs):
        with Process([sys.executable, "-m", __name__, model]) as process:
            found = json.loads(process.line())
        for metric, taken in samples.items():
            taken.append(found[metric])
        note(f"run {number + 1}: {found['fetch_s']:.3f} s, {found['mb_per_s']:,.0f} MB/s")
    result = Result()
    for metric, taken in samples.items():
        result.add(NAME, metric, METRICS[metric], taken)
    print(result.table())
    if arguments.json:
        result.write(arguments.json)
    return 0


def fetch_once(model: str) -> dict[str, float]:
    """Fetch once in this process, which has imported everything before the clock starts."""
    from medusa_runtime.config import from_env
    from medusa_runtime.fetch.prefetcher import prefetch
    from medusa_runtime.region.reader import Region
    from medusa_runtime.timeline import Timeline

    settings = from_env(os.environ, model=model)
    assert settings.model is not None
    region, timeline = Region.create(), Timeline.create("prefetcher")
    cpu_before, began = _cpu_s(), time.perf_counter()
    prefetch(region, settings.model, settings=settings, timeline=timeline)
    seconds, cpu = time.perf_counter() - began, _cpu_s() - cpu_before
    fetched = region.progress().total_bytes
    return {"fetch_s": seconds, "mb_per_s": fetched / seconds / 1e6, "cpu_s": cpu / max(fetched, 1) * 1e9}


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    try:
        print(json.dumps(fetch_once(sys.argv[1])), flush=True)
    except MedusaError as error:
        sys.exit(f"{error} [{error.code}]")
