"""Measure the time that a state bundle saves before the first byte of weights is requested, on a store with latency.

    python -m benchmarks.state_bundle --model out/llama-57m --latency 0.03 --json out/state-bundle.json

A server answers each request after the latency. Fetches with and without the bundle run in turn, each in a fork of this
process, which has imported everything. ``index_s`` is the time until the region is laid out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

from medusa_adapters.bench.result import Result
from medusa_runtime.config import Settings
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.region.reader import Region
from medusa_runtime.state.bundle import reader as bundle  # noqa: F401  imported before anything is timed
from medusa_runtime.state.materialize import Materialization
from medusa_runtime.state.restore import BundleRestorer
from medusa_runtime.timeline import Timeline

from benchmarks.origin import Origin, Variant

_WITHOUT, _WITH = "no-bundle", "bundle"


def index_s(url: str, state: str | None) -> float:
    """Return the seconds until a prefetcher has laid out the region. The prefetcher is then killed."""
    region = Region.create()
    began = time.monotonic()
    child = os.fork()
    if not child:
        settings = Settings(state=state)
        timeline = Timeline.create("prefetcher")
        prefetch(region, url, settings=settings, timeline=timeline, bundle=BundleRestorer(settings, timeline))
        os._exit(0)
    try:
        region.wait_index(60)
        return time.monotonic() - began
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        region.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--latency", type=float, default=0.03, help="seconds before each answer")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = Result()
    with (
        tempfile.TemporaryDirectory(prefix="medusa-bench-") as scratch,
        tempfile.TemporaryDirectory(prefix="medusa-bench-") as origin_scratch,
    ):
        root = Path(scratch)
        for file in arguments.model.resolve().iterdir():
            if file.is_file():
                shutil.copy(file, root)
        with Materialization(Settings(model=str(root)), root / ".medusa") as making:
            making.prepare()
            making.commit()
        variant = Variant("latency", latency_s=arguments.latency)
        with Origin(root, Path(origin_scratch), variant, builtin=True) as origin:
            url = origin.url
            samples: dict[str, list[float]] = {_WITHOUT: [], _WITH: []}
            for _ in range(arguments.runs + 1):
                samples[_WITHOUT].append(index_s(url, "none"))
                samples[_WITH].append(index_s(url, None))
    for name, taken in samples.items():
        result.add(name, "index_s", "s", taken[1:])
    print(result.table())
    if arguments.json:
        result.write(arguments.json)


if __name__ == "__main__":
    main()
