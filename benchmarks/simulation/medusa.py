"""MEDUSA's Figures 10 and 11: tail latency under Poisson arrivals, depending on the length of the loading phase."""

from __future__ import annotations

from dataclasses import replace

from medusa_cluster.policy.scaling import Bounds
from medusa_cluster.simulation.fleet import GBIT, Fleet, Machine, Model
from medusa_cluster.simulation.profiles import GB, PROFILES, LinearSpeed, Profile, Stages
from medusa_cluster.simulation.result import Outcome, mean, percentile
from medusa_cluster.simulation.simulator import Simulation
from medusa_cluster.simulation.strategy import strategy_named, with_bounds
from medusa_cluster.simulation.trace import LENGTHS, poisson

from benchmarks.simulation.figure import LESS, Figure, Line, Order, chart

SYSTEMS = ("vLLM", "vLLM + ASYNC", "w/o CUDA graph", "MEDUSA")
# Loading phases in seconds, in the order of SYSTEMS, from the published results of Figure 7. Without CUDA graphs it is
# vLLM's minus the capturing stage, whose share is in the published results of Figure 2.
_LOADING = {
    "qwen1.5-4b@a100": (3.019, 2.748, 3.019 * (1 - 0.301), 1.743),
    "llama2-7b@a100": (3.856, 3.265, 3.856 * (1 - 0.271), 1.937),
}
# Seconds of a decode step with one sequence, and for each further sequence; first with CUDA graphs, then without. They
# come from the published results of Figure 3: 338 tokens of one and of eight sequences.
_DECODING = {
    "qwen1.5-4b@a100": ((0.00892, 0.000327), (0.01228, 0.000172)),
    "llama2-7b@a100": ((0.01304, 0.000271), (0.01328, 0.000254)),
}
# As in the published scheduler, a request goes to an instance with fewer than 16 requests, or else to a new one, if a
# device is free. An instance ends as soon as it has no request.
_REQUESTS = 16
_BOUNDS = Bounds(keep_alive_s=0.0, window_s=0.0, spare_s=0.0, requests_upper=1.0, requests_lower=1.0)
_SECONDS = 60.0  # the most seconds of a trace, as in the published scripts; its first request finds no instance
_TRACES = range(1, 11)  # the seeds of the traces; Figure 11 shows their mean
# The 99th percentiles of Figure 11 in the published results, at 4.4 to 4.6 answers a second of Llama2 7B.
_PUBLISHED = (3.320, 2.533, 2.308, 1.881)
# How much of the loading phases must have been done by the warm pool for all numbers of Figure 11 to be in band.
_DONE_S = (0.4, 0.6, 0.35, 0.0)
_LESS = {"llama2-7b@a100": 50.5, "qwen1.5-4b@a100": 53.0}  # percent, the largest reductions of Figure 10


def run(model: str, system: str, rate: float, seconds: float, seed: int = 1, done_s: float = 0.0) -> Outcome:
    """Simulate a trace. The warm pool's workers have done ``done_s`` of the loading phase."""
    profile: Profile = PROFILES[model]
    step_s, more_s = _DECODING[model][system == "w/o CUDA graph"]
    assert isinstance(profile.speed, LinearSpeed)
    speed = replace(profile.speed, decode_s=step_s - more_s, decode_s_per_sequence=more_s)
    loading = _LOADING[model][SYSTEMS.index(system)] - done_s
    profile = replace(profile, speed=speed, stages=Stages(loading, 0.0, 0.0, 1e15, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    machine = Machine("a100", 1, 100 * GBIT, 4, memory_bytes=200 * GB)
    strategy = replace(with_bounds(strategy_named("single"), _BOUNDS), cache="all")
    fleet = Fleet("medusa", (machine,), (Model("m", profile, concurrency=_REQUESTS),))
    return Simulation(fleet, strategy, poisson([rate], min(seconds, _SECONDS), [LENGTHS["sharegpt"]], seed)).run()


def figure_10(seconds: float) -> Figure:
    found, orders = [], []
    series: dict[str, list[tuple[float, float]]] = {}
    for model in _LOADING:
        best = 0.0
        for rate in (2.0, 10.0):
            tails = {}
            for system in SYSTEMS:
                tails[system] = percentile(run(model, system, rate, seconds).ttft_s, 0.99)
                series.setdefault(f"{system}", []).append((rate, tails[system])) if "qwen" in model else None
                found.append(Line(f"{model}, {system}, {rate:g}/s: p99 TTFT", tails[system], None, "s"))
            orders.append(Order(f"{model}, {rate:g}/s, order", dict(reversed(tails.items()))))
            best = max(best, 100 * (1 - tails["MEDUSA"] / tails["vLLM"]))
        found.append(Line(f"{model}: MEDUSA below vLLM, the most", best, _LESS[model], LESS))
    return Figure(
        "medusa-10",
        "MEDUSA Figure 10: 99th percentile of TTFT by load",
        chart(series, "requests a second, Qwen1.5 4B", "p99 TTFT, s"),
        found,
        "A start is its loading phase, as the paper has warm environments. The lengths of loading phases and decode "
        "steps, the minute of a trace, and when an instance starts and ends are those of the published scripts and "
        "results. At 10 requests a second of Llama2 7B four instances with 16 requests each are full here, and "
        "requests wait for one another; the published scheduler then gives them more.",
        orders,
    )


def figure_11(seconds: float) -> Figure:
    found = []
    series: dict[str, list[tuple[float, float]]] = {}
    for system in SYSTEMS:
        for rate in (1.0, 2.0, 4.5, 8.0):
            runs = [run("llama2-7b@a100", system, rate, seconds, seed) for seed in _TRACES]
            done = mean([outcome.requests / min(seconds, _SECONDS) for outcome in runs])
            tail = mean([percentile(outcome.ttft_s, 0.99) for outcome in runs])
            series.setdefault(system, []).append((done, tail))
            published = _PUBLISHED[SYSTEMS.index(system)] if rate == 4.5 else None
            found.append(Line(f"{system}, {done:.2f} answers a second: p99 TTFT", tail, published, "s"))
    tails = {system: row[2][1] for system, row in series.items()}
    for system, less in (("vLLM", 43.0), ("vLLM + ASYNC", 29.9), ("w/o CUDA graph", 27.0)):
        ratio = tails["MEDUSA"] / tails[system]
        found.append(Line(f"MEDUSA's p99 over that of {system} at 4.5/s", ratio, 1 - less / 100, "×"))
        loading = _LOADING["llama2-7b@a100"]
        start = 1 - loading[-1] / loading[SYSTEMS.index(system)]
        found.append(Line(f"of it by shorter starts: below {system}", 100 * start, None, LESS))
    for system, done_s in zip(SYSTEMS, _DONE_S, strict=True):
        runs = [run("llama2-7b@a100", system, 4.5, seconds, seed, done_s) for seed in _TRACES]
        tail = mean([percentile(outcome.ttft_s, 0.99) for outcome in runs])
        found.append(Line(f"{system}, loading shorter by {done_s:g} s: p99 TTFT", tail, None, "s"))
    return Figure(
        "medusa-11",
        "MEDUSA Figure 11: 99th percentile of TTFT by throughput",
        chart(series, "answers a second", "p99 TTFT, s"),
        found,
        "Means of ten traces of a minute each, as in Figure 10. The slowest first tokens are those that wait for a "
        "start, so the ratios are nearly those of the loading phases. The published 99th percentiles are shorter than "
        "the published loading phases, by 0.5 s (vLLM), 0.7 (ASYNC), 0.5 (without CUDA graphs) and 0.1 (MEDUSA): its "
        "pool's workers have done a part of the loading. That is why MEDUSA's advantage is larger here: with loading "
        "phases shorter by 0.4, 0.6, 0.35 and 0 s all numbers are in band. Decoding "
        "without CUDA graphs costs Llama2 7B 1 or 2 % in the published results, and is not what makes the last system "
        "slower.",
        [Order("order at 4.5/s", dict(reversed(tails.items())))],
    )
