"""The papers' figures of pipeline groups and live scaling, drawn from runs in a laboratory.

Each takes about a minute. The published numbers come from GPUs and models of many gigabytes. So compare shapes and
ratios, not seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

from medusa_runtime.errors import EngineError
from medusa_runtime.timeline import Stage

from benchmarks import svg
from benchmarks.pipeline.live import BATCH_TOKENS, OUTSTANDING, Load, burst, pair, store_rate
from benchmarks.pipeline.options import Options
from benchmarks.pipeline.workers import Site, Workers
from benchmarks.simulation.figure import Figure, Line, chart

_SIZE = 4
_LINK_BYTES_PER_S = 5e6
_TOKENS, _PROMPT = 512, 64
_READY_S = 120.0
_LOAD_S = 12.0  # how long a live target loads
_STEP_S = 1.0


def paraserve_4(options: Options) -> Figure:
    """Draw the timeline of a group that becomes one instance, and compare its first token with that of one worker."""
    with Site(options.over(_LINK_BYTES_PER_S), _SIZE) as site:
        stages: dict[int, list[Stage]] = {}
        first: dict[int, float] = {}
        for size in (1, _SIZE):
            with Workers.group(site, size, then="down") as workers:
                stream = workers.stream(prompt=_PROMPT, count=16, began=workers.began)
                first[size] = stream.ttft_s
                if size > 1:
                    _await(workers, 0, "workers", 1)
                workers.end()
                stages[size] = workers.timelines[0]
    shown = {name: _length(stages[_SIZE], name) for name in ("form", "gather")}
    found = [
        Line("first token of one worker", first[1], None, "s"),
        Line(f"first token of {_SIZE} workers", first[_SIZE], None, "s"),
        Line("one over four", first[1] / first[_SIZE], None, "times"),
        *(Line(f"the leader's stage {name}", value, None, "s") for name, value in shown.items()),
    ]
    return Figure(
        "paraserve-4",
        "ParaServe Figure 4: a cold start by a group of four that becomes one instance",
        svg.gantt(stages[_SIZE]).replace(">", f"><style>{svg.STYLE}</style>", 1).replace("<svg ", _SVG, 1),
        found,
        "The paper's figure is a sketch without numbers. Workers' stages are shown by the leader's clock.",
        by="measured",
    )


def paraserve_7(options: Options) -> Figure:
    """Draw how many workers serve over time: a group that becomes four instances, and four that load first."""
    series: dict[str, list[tuple[float, float]]] = {}
    with Site(options.over(_LINK_BYTES_PER_S), _SIZE) as site:
        with Workers(site, [None] * _SIZE, [None] * _SIZE) as loading:
            ready = []
            for client in loading.clients:
                client.wait_ready(_READY_S)
                ready.append(time.monotonic() - loading.began)
        with Workers.group(site, _SIZE, then="up") as group:
            served = group.stream(prompt=_PROMPT, count=1, began=group.began).ttft_s
    end = max(*ready, served) * 1.1
    series["load first"] = _steps([(at, number + 1) for number, at in enumerate(sorted(ready))], end)
    series["group of four"] = _steps([(served, _SIZE)], end)
    half = sorted(ready)[_SIZE // 2 - 1]
    return Figure(
        "paraserve-7",
        "ParaServe Figure 7: workers that serve, over time",
        chart(series, "seconds since the start", "workers that serve"),
        [
            Line("load first: half of the workers serve", half, None, "s"),
            Line("group: all workers serve", served, None, "s"),
            Line("earlier by", half / served, None, "times"),
        ],
        "The paper's figure is a sketch of 30 workers without numbers.",
        by="measured",
    )


def paraserve_13(options: Options) -> Figure:
    """Draw the tokens of one request over time, by a group that stays a group and by one that becomes an instance."""
    series: dict[str, list[tuple[float, float]]] = {}
    with Site(options.over(_LINK_BYTES_PER_S), _SIZE) as site:
        for name, then in (("without scaling down", "stay"), ("with scaling down", "down")):
            with Workers.group(site, _SIZE, then=then) as workers:
                stream = workers.stream(prompt=_PROMPT, count=_TOKENS, began=workers.began)
                series[name] = [(at, float(number + 1)) for number, at in enumerate(stream.times)]
    ends = {name: points[-1][0] for name, points in series.items()}
    slow, fast = ends.values()
    return Figure(
        "paraserve-13",
        f"ParaServe Figure 13: tokens of one request over time, {_TOKENS} in all, four workers",
        chart(series, "seconds since the start", "tokens"),
        [
            *(Line(f"{name}: the last token", at, None, "s") for name, at in ends.items()),
            Line("shorter by", slow / fast, 2.29, "times"),
        ],
        "The gain is that of a step over one instance against one through four. On CPUs with cores of their own a step "
        "through four nodes costs the messages only, where on the paper's shared GPUs it costs computing as well. A "
        "node that rests while others compute never uses up its quota here, so that four nodes are faster than one.",
        by="measured",
    )


def blitzscale_15(options: Options) -> Figure:
    """Draw the first tokens of eight batches while the target loads, with best effort and with ZigZag."""
    series: dict[str, list[tuple[float, float]]] = {}
    with Site(replace(options, batch_tokens=BATCH_TOKENS), 2) as site:
        rate, batches = store_rate(site)
        for schedule in ("best-effort", "zigzag"):
            series[schedule] = [
                (float(number + 1), at / min(batches)) for number, at in enumerate(burst(site, schedule, rate))
            ]
    worst = {name: points[-1][1] for name, points in series.items()}
    sixth = {name: points[5][1] for name, points in series.items()}
    return Figure(
        "blitzscale-15",
        "BlitzScale Figure 15: when each of eight batches is done, as a layer loads while six run",
        chart(series, "batch", "time in prefills of one batch"),
        [
            Line("last batch: best effort over ZigZag", worst["best-effort"] / worst["zigzag"], 47 / 31, "times"),
            Line("sixth batch: best effort over ZigZag", sixth["best-effort"] / sixth["zigzag"], 37 / 27, "times"),
        ],
        "Published is the paper's example of 7 layers, counted in layers (the sixth batch 37 and 27). This one has "
        "16, and its last batch is 1.68 times earlier by counting.",
        by="measured",
    )


def blitzscale_21(options: Options) -> Figure:
    """Draw requests per second while an instance loads that helps with ZigZag, or with best effort."""
    series: dict[str, list[tuple[float, float]]] = {}
    doubled: dict[str, float] = {}
    with Site(options, 2) as site:
        rate = sum(site.bytes.layers) / _LOAD_S
        for name, schedule in (("ZigZag", "zigzag"), ("best effort", "best-effort")):
            with pair(site, schedule, rate) as (workers, _):
                layers = len(site.bytes.layers)
                with closing(Load(workers, OUTSTANDING)) as load:
                    began = time.monotonic()
                    _await(workers, 1, "layers_loaded", layers)
                    loaded = time.monotonic() - began
                times = [at - began for at in load.times]
                count = int(loaded / _STEP_S)
                series[name] = [
                    ((step + 0.5) * _STEP_S, sum(step <= at / _STEP_S < step + 1 for at in times) / _STEP_S)
                    for step in range(count)
                ]
                doubled[name] = sum(at < loaded for at in times) / loaded
    return Figure(
        "blitzscale-21",
        "BlitzScale Figure 21: requests served a second while a second instance loads",
        chart(series, "seconds since the load began", "requests a second"),
        [
            *(Line(f"{name}: requests a second while it loads", value, None, "1/s") for name, value in doubled.items()),
            Line("ZigZag over best effort", doubled["ZigZag"] / doubled["best effort"], None, "times"),
        ],
        "The paper scales from two to eight instances: all are there after 1.2 s, live, and 2.0 s from host memory. "
        "Here is one pair, so that its throughput can be seen between one instance's and two's.",
        by="measured",
    )


FIGURES: dict[str, Callable[[Options], Figure]] = {
    "cold": paraserve_4,
    "burst": paraserve_7,
    "consolidation": paraserve_13,
    "zigzag": blitzscale_15,
    "live": blitzscale_21,
}
_SVG = '<svg xmlns="http://www.w3.org/2000/svg" '


def _await(workers: Workers, rank: int, name: str, value: int) -> None:
    """Wait until the engine of a worker reports this value. Raises EngineError when that takes too long."""
    deadline = time.monotonic() + _READY_S
    while (found := workers.stats(rank).get(name)) != value:
        if time.monotonic() > deadline:
            raise EngineError(f"worker {rank}: expected {name} of {value} within {_READY_S:g} s, found {found}")
        time.sleep(0.05)


def _steps(points: list[tuple[float, int]], end: float) -> list[tuple[float, float]]:
    """Return the points of a step line, which jumps to a new value at each of ``points``."""
    found, level = [(0.0, 0.0)], 0.0
    for at, value in points:
        found += [(at, level), (at, float(value))]
        level = float(value)
    return [*found, (end, level)]


def _length(stages: list[Stage], name: str) -> float:
    return sum((stage.end_ns - stage.start_ns) / 1e9 for stage in stages if stage.name == name)
