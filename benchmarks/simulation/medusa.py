"""MEDUSA's figures 10 and 11: tail latency under Poisson arrivals, by what a start's loading phase costs."""

from __future__ import annotations

from dataclasses import replace

from medusa_cluster.simulation.fleet import GBIT, Fleet, Machine, Model
from medusa_cluster.simulation.profiles import GB, PROFILES, Profile, Stages
from medusa_cluster.simulation.result import Outcome, mean, percentile
from medusa_cluster.simulation.simulator import Simulation
from medusa_cluster.simulation.strategy import strategy_named
from medusa_cluster.simulation.trace import LENGTHS, poisson

from benchmarks.simulation.figure import Figure, Line, chart

# Loading phase of Qwen1.5 4B in seconds (Figure 8 of the paper). Llama2 7B's is that of vLLM scaled by its weights'
# share; MEDUSA and ASYNC shorten both alike.
_LOADING = {"qwen1.5-4b@a100": 2.85, "llama2-7b@a100": 3.3}
SYSTEMS = {"vLLM": 1.0, "vLLM + ASYNC": 1 - 0.13, "w/o CUDA graph": 1 - 0.9 / 2.85, "MEDUSA": 1 - 0.414}
_EAGER = 1.6  # decode without CUDA graphs; the paper says up to 2.4
_SECONDS = 60.0  # of the trace, from a first request that finds no instance; at most
_TRACES = range(1, 11)  # seeds, of which Figure 11 takes the mean
_LESS = {"llama2-7b@a100": 50.5, "qwen1.5-4b@a100": 53.0}  # percent, the largest reductions of Figure 10


def run(model: str, system: str, rate: float, seconds: float, seed: int = 1) -> Outcome:
    profile: Profile = PROFILES[model]
    speed = profile.speed
    if system == "w/o CUDA graph":
        speed = replace(speed, decode_s=speed.decode_s * _EAGER)
    loading = _LOADING[model] * SYSTEMS[system]
    profile = replace(profile, speed=speed, stages=Stages(loading, 0.0, 0.0, 1e15, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    machine = Machine("a100", 1, 100 * GBIT, 4, memory_bytes=200 * GB)
    strategy = replace(strategy_named("single"), cache="all")
    fleet = Fleet("medusa", (machine,), (Model("m", profile, concurrency=48),))
    return Simulation(fleet, strategy, poisson([rate], min(seconds, _SECONDS), [LENGTHS["sharegpt"]], seed)).run()


def figure_10(seconds: float) -> Figure:
    found, series = [], {}
    for model in _LOADING:
        best = 0.0
        for rate in (2.0, 10.0):
            tails = {}
            for system in SYSTEMS:
                tails[system] = percentile(run(model, system, rate, seconds).ttft_s, 0.99)
                series.setdefault(f"{system}", []).append((rate, tails[system])) if "qwen" in model else None
                found.append(Line(f"{model}, {system}, {rate:g}/s: p99 TTFT", tails[system], None, "s"))
            best = max(best, 100 * (1 - tails["MEDUSA"] / tails["vLLM"]))
        found.append(Line(f"{model}: MEDUSA below vLLM, the most", best, _LESS[model], "%"))
    return Figure(
        "medusa-10",
        "MEDUSA Figure 10: 99th percentile of TTFT by load",
        chart(series, "requests a second, Qwen1.5 4B", "p99 TTFT, s"),
        found,
        "A start is its loading phase, as the paper has warm environments. The paper does not say when its scheduler "
        "starts or ends an instance; here our policy does, and ends idle ones after 30 s. Nor does it say how long its "
        "trace is, which decides: at 10 requests a second of Qwen 1.5 MEDUSA is 43 % below vLLM in 30 s, 50 % in the "
        "minute simulated here, 53 % in two, 81 % in five, and 12 % in an hour, in which fewer than one request in a "
        "hundred waits for a start.",
    )


def figure_11(seconds: float) -> Figure:
    found, series = [], {}
    for system in SYSTEMS:
        for rate in (1.0, 2.0, 4.5, 8.0):
            runs = [run("llama2-7b@a100", system, rate, seconds, seed) for seed in _TRACES]
            done = mean([outcome.requests / min(seconds, _SECONDS) for outcome in runs])
            tail = mean([percentile(outcome.ttft_s, 0.99) for outcome in runs])
            series.setdefault(system, []).append((done, tail))
            found.append(Line(f"{system}, {done:.2f} answers a second: p99 TTFT", tail, None, "s"))
    tails = {system: row[2][1] for system, row in series.items()}
    for system, less in (("vLLM", 43.0), ("vLLM + ASYNC", 29.9), ("w/o CUDA graph", 27.0)):
        ratio = tails["MEDUSA"] / tails[system]
        found.append(Line(f"MEDUSA's p99 over that of {system} at 4.5/s", ratio, 1 - less / 100, "×"))
        found.append(Line(f"the same: below {system}", 100 * (1 - ratio), less, "%"))
        start = 1 - SYSTEMS["MEDUSA"] / SYSTEMS[system]
        found.append(Line(f"of it by shorter starts: below {system}", 100 * start, None, "%"))
    return Figure(
        "medusa-11",
        "MEDUSA Figure 11: 99th percentile of TTFT by throughput",
        chart(series, "answers a second", "p99 TTFT, s"),
        found,
        "Means of ten traces of a minute each, as in Figure 10. The slowest first tokens are those that wait for a "
        "start, so the ratios are nearly those of the loading phases, of which the paper prints Qwen's: 41.4 % below "
        "vLLM and 33 % below ASYNC (its means over ten models are 42.5 and 34.4 %), and 14 % below a start without "
        "CUDA graphs. What is missing of the published 27 % the paper ascribes to slower serving; a decode step 1.6 or "
        "2.4 times as long changes nothing here, as no request waits for decodes at this rate.",
    )
