"""An overloaded instance and a new one that helps while it loads (BlitzScale §5.2, Figures 15 and 16).

The target's store sends at a steady rate, so that loading takes as long as is wanted, and layers come one by one.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.pipeline.options import Options, row
from benchmarks.pipeline.workers import Site, Stream, Workers, follow
from benchmarks.pipeline.zigzag import Scaling, best_effort
from benchmarks.pipeline.zigzag import schedule as schedule_of

_PROMPT, _COUNT = 256, 1
_OUTSTANDING = 12
# The paper's example (Figure 15): a layer takes as long to load as six batches take to run one, and eight batches wait.
_LOAD, _BATCHES = 6, 8
_BATCH_TOKENS = 512
_ALONE_S = 10.0
_LOOK_S = 0.1
_SERVER = Path(__file__).parents[1] / "ranged_server.py"


def rows(options: Options) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    if options.wants("live"):
        alone, half, ratios = [], [], []
        with Site(options, 2) as site:
            for _ in range(options.runs):
                before, during = _throughput(site)
                alone.append(before)
                half.append(during)
                ratios.append(during / before)
        result.append(row("live-alone", "requests_per_s", "1/s", alone))
        result.append(row("live-half", "requests_per_s", "1/s", half))
        result.append(row("live", "throughput_ratio_half", "ratio", ratios))
    if options.wants("zigzag"):
        result += _schedules(options)
    return result


def _schedules(options: Options) -> list[dict[str, Any]]:
    """The worst request of the paper's burst by each schedule, by the clock and by the count of layers."""
    worst: dict[str, list[float]] = {"best-effort": [], "zigzag": []}
    with Site(replace(options, batch_tokens=_BATCH_TOKENS), 2) as site:
        with Workers.group(site, 1) as one:
            one.clients[0].wait_ready(600)
            batches = [one.stream(prompt=_BATCH_TOKENS, count=_COUNT, number=number).ttft_s for number in range(4)]
        site.load_s = _LOAD * min(batches[1:])
        for _ in range(options.runs):
            for schedule, found in worst.items():
                found.append(_worst(site, schedule))
        counted = Scaling.equal(len(site.bytes.layers), _LOAD, _BATCHES)
    ratios = [slow / fast for slow, fast in zip(worst["best-effort"], worst["zigzag"], strict=True)]
    ideal = max(best_effort(counted).finish) / max(schedule_of(counted).finish)
    return [
        *(row(f"zigzag-{schedule}", "worst_ttft_s", "s", found) for schedule, found in worst.items()),
        row("zigzag-batch", "prefill_s", "s", batches[1:]),
        row("zigzag-counted", "ratio", "ratio", [ideal]),
        row("zigzag", "ratio", "ratio", ratios),
    ]


@contextmanager
def _slow_store(site: Site) -> Iterator[str]:
    """A store in the target's own node whose one connection takes ``load_s`` for the model."""
    rate = site.total_bytes / site.load_s
    command = [sys.executable, str(_SERVER), str(site.options.model), "--rate", str(rate)]
    node = site.laboratory.nodes[1]
    process = site.laboratory.popen(node, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        process.wait()


@contextmanager
def _pair(site: Site, schedule: str) -> Iterator[Workers]:
    """A source that is loaded, and a target that has just begun to load."""
    with _slow_store(site) as url, Workers.group(site, 2, mode="live", schedule=schedule, url_1=url) as workers:
        workers.clients[0].wait_ready(600)
        yield workers


class _Load:
    """So many requests at a time, one after another; counts those that have ended."""

    def __init__(self, workers: Workers, outstanding: int) -> None:
        self._workers = workers
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self.count = 0
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(outstanding)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        while not self._ended.is_set():
            made = Stream(time.monotonic())
            follow(made, self._workers.begin(prompt=_PROMPT, count=_COUNT, number=number))
            with self._lock:
                self.count += 1

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


def _throughput(site: Site) -> tuple[float, float]:
    """Requests a second of the source alone, and with a target that has half of the layers."""
    layers = len(site.bytes.layers)
    with Workers.group(site, 1) as one:
        one.clients[0].wait_ready(600)
        load = _Load(one, _OUTSTANDING)
        time.sleep(1.0)
        first, began = load.count, time.monotonic()
        time.sleep(_ALONE_S)
        alone = (load.count - first) / (time.monotonic() - began)
        load.close()
    with _pair(site, "zigzag") as workers:
        load = _Load(workers, _OUTSTANDING)
        while workers.stats(1).get("layers_loaded", 0) < layers // 2:
            time.sleep(_LOOK_S)
        first, began = load.count, time.monotonic()
        while workers.stats(1).get("layers_loaded", 0) <= layers // 2 + 1 and time.monotonic() - began < 2 * _ALONE_S:
            time.sleep(_LOOK_S)
        half = (load.count - first) / (time.monotonic() - began)
        load.close()
    return alone, half


def _worst(site: Site, schedule: str) -> float:
    """The longest time to a first token in a burst that comes when the target has its first layer."""
    with _pair(site, schedule) as workers:
        while workers.stats(1).get("layers_loaded", 0) < 1:
            time.sleep(_LOOK_S / 10)
        streams, threads = [], []
        began = time.monotonic()
        for number in range(_BATCHES):
            made = Stream(began)
            source = workers.begin(prompt=_BATCH_TOKENS, count=_COUNT, number=number)
            streams.append(made)
            threads.append(threading.Thread(target=follow, args=(made, source)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        return max(stream.ttft_s for stream in streams)
