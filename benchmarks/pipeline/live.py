"""An overloaded instance and a new one that helps while it loads (BlitzScale §5.2, Figures 15 and 16).

The new instance (the target) reads from a store in its own node, which sends at a steady rate. So layers come one by
one, at the rate that a row needs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from medusa_runtime.errors import EngineError

from benchmarks.pipeline.options import Options
from benchmarks.pipeline.workers import Site, Stream, Workers, follow
from benchmarks.pipeline.zigzag import Scaling, best_effort
from benchmarks.pipeline.zigzag import schedule as schedule_of
from benchmarks.result_row import row

_PROMPT, _COUNT = 512, 1
OUTSTANDING = 12
# The paper's example (Figure 15): a layer takes as long to load as six batches take to run one, and eight batches wait.
_LOAD, _BATCHES = 6, 8
BATCH_TOKENS = 1024  # so many that computing a batch takes much longer than a layer's fetch computes
_WARM_S, _MEASURED_S = 2.0, 12.0
_HALF_S = 4.0  # the time in which the target gets half of the layers
_POLL_S = 0.02
_SERVER = Path(__file__).parents[1] / "ranged_server.py"


def rows(options: Options) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    if options.wants("live"):
        result += _halves(options)
    if options.wants("zigzag"):
        result += _schedules(options)
    return result


def _halves(options: Options) -> list[dict[str, Any]]:
    alone, half, ratios = [], [], []
    cpu: dict[str, list[float]] = {"alone": [], "source": [], "target": []}
    with Site(options, 2) as site:
        for _ in range(options.runs):
            before, cpu_alone = _throughput_alone(site)
            during, cpu_source, cpu_target = _throughput_half(site)
            alone.append(before)
            half.append(during)
            ratios.append(during / before)
            for found, value in zip(cpu.values(), (cpu_alone, cpu_source, cpu_target), strict=True):
                found.append(value)
    by_cpu = [one / max(two) for one, *two in zip(*cpu.values(), strict=True)]
    return [
        row("live-alone", "requests_per_s", "1/s", alone),
        row("live-half", "requests_per_s", "1/s", half),
        *(row(f"live-{name}", "cpu_s_per_request", "s", found) for name, found in cpu.items()),
        row("live-cpu", "ratio", "ratio", by_cpu),
        row("live", "throughput_ratio_half", "ratio", ratios),
    ]


def _schedules(options: Options) -> list[dict[str, Any]]:
    """Measure the slowest request of the paper's burst with each schedule, in seconds and counted in layers."""
    worst: dict[str, list[float]] = {"best-effort": [], "zigzag": []}
    with Site(replace(options, batch_tokens=BATCH_TOKENS), 2) as site:
        rate, batches = store_rate(site)
        for _ in range(options.runs):
            for schedule, found in worst.items():
                found.append(burst(site, schedule, rate)[-1])
        counted = Scaling.equal(len(site.bytes.layers), _LOAD, _BATCHES)
    ratios = [slow / fast for slow, fast in zip(worst["best-effort"], worst["zigzag"], strict=True)]
    ideal = max(best_effort(counted).finish) / max(schedule_of(counted).finish)
    return [
        *(row(f"zigzag-{schedule}", "worst_ttft_s", "s", found) for schedule, found in worst.items()),
        row("zigzag-batch", "prefill_s", "s", batches),
        row("zigzag-counted", "ratio", "ratio", [ideal]),
        row("zigzag", "ratio", "ratio", ratios),
    ]


def store_rate(site: Site) -> tuple[float, list[float]]:
    """Return the bytes per second at which layers arrive as slowly as in the paper's example.

    Also return samples of the seconds that one batch takes.
    """
    with Workers.group(site, 1) as one:
        one.clients[0].wait_ready(600)
        batches = [one.stream(prompt=BATCH_TOKENS, count=_COUNT, number=number).ttft_s for number in range(4)][1:]
    return sum(site.bytes.layers) / (_LOAD * min(batches)), batches


class _Store:
    """A store in the target's own node, which sends ``rate`` bytes per second over its one connection."""

    def __init__(self, site: Site, rate: float) -> None:
        node = site.laboratory.nodes[1]
        command = [sys.executable, str(_SERVER), str(site.options.model), "--rate", str(rate)]
        self._process = site.laboratory.popen(node, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"  # type: ignore[union-attr]
        self._pid = next(pid for pid, line in site.laboratory.processes(node).items() if str(_SERVER) in line)

    def stop(self) -> None:
        """Send nothing more until ``close``."""
        os.kill(self._pid, signal.SIGSTOP)

    def close(self) -> None:
        os.kill(self._pid, signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def pair(site: Site, schedule: str, rate: float) -> Iterator[tuple[Workers, _Store]]:
    """Start a source that has loaded the model, and a target that has just begun to load from a store of ``rate``."""
    with (
        closing(_Store(site, rate)) as store,
        Workers.group(site, 2, mode="live", schedule=schedule, url_1=store.url) as workers,
    ):
        workers.clients[0].wait_ready(600)
        yield workers, store


class Load:
    """A load of ``outstanding`` requests at any time, until ``close``.

    ``times`` has the end of each request (``time.monotonic``).
    """

    def __init__(self, workers: Workers, outstanding: int) -> None:
        self._workers = workers
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self.times: list[float] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(outstanding)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        while not self._ended.is_set():
            made = Stream(time.monotonic())
            follow(made, self._workers.begin(prompt=_PROMPT, count=_COUNT, number=number))
            with self._lock:
                self.times.append(time.monotonic())

    def measure(self, nodes: int) -> tuple[float, list[float]]:
        """Measure for a while. Return the requests per second, and the CPU seconds of each node per request.

        Raises EngineError if no request ends meanwhile.
        """
        time.sleep(_WARM_S)
        site = self._workers.site
        cpu = [site.cpu_s(number) for number in range(nodes)]
        first, began = len(self.times), time.monotonic()
        time.sleep(_MEASURED_S)
        ended = len(self.times) - first
        if not ended:
            raise EngineError(f"no request of {_PROMPT} tokens ended within {_MEASURED_S:g} s")
        passed = time.monotonic() - began
        return ended / passed, [(site.cpu_s(number) - before) / ended for number, before in enumerate(cpu)]

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


def _throughput_alone(site: Site) -> tuple[float, float]:
    """Return the requests per second of the source alone, and its CPU seconds per request."""
    with Workers.group(site, 1) as one:
        one.clients[0].wait_ready(600)
        with closing(Load(one, OUTSTANDING)) as load:
            rate, (cpu_s,) = load.measure(1)
    return rate, cpu_s


def _throughput_half(site: Site) -> tuple[float, float, float]:
    """Return the requests per second with a target that has and keeps half of the layers, and both CPU seconds."""
    half = len(site.bytes.layers) // 2
    with pair(site, "zigzag", sum(site.bytes.layers) / 2 / _HALF_S) as (workers, store):
        while workers.stats(1).get("layers_loaded", 0) < half:
            time.sleep(_POLL_S)
        store.stop()
        with closing(Load(workers, OUTSTANDING)) as load:
            rate, (source_s, target_s) = load.measure(2)
    return rate, source_s, target_s


def burst(site: Site, schedule: str, rate: float) -> list[float]:
    """Send a burst as soon as the target has its first layer. Return the times to the first tokens, sorted."""
    with pair(site, schedule, rate) as (workers, _):
        while workers.stats(1).get("layers_loaded", 0) < 1:
            time.sleep(_POLL_S)
        streams, threads = [], []
        began = time.monotonic()
        for number in range(_BATCHES):
            made = Stream(began)
            source = workers.begin(prompt=BATCH_TOKENS, count=_COUNT, number=number)
            streams.append(made)
            threads.append(threading.Thread(target=follow, args=(made, source)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        return sorted(stream.ttft_s for stream in streams)
