"""Which speed of scaling an SLO needs (BlitzScale's Figure 3), and for which starts it needs live scaling (§5.2)."""

from __future__ import annotations

import math
from dataclasses import replace

from medusa_cluster.simulation.fleet import GBIT, Fleet, Model
from medusa_cluster.simulation.profiles import PROFILES
from medusa_cluster.simulation.result import Outcome, mean
from medusa_cluster.simulation.simulator import Simulation
from medusa_cluster.simulation.strategy import strategy_named, with_bounds
from medusa_cluster.simulation.trace import azure, scale, window

from benchmarks.simulation.blitzscale import BOUNDS, CASES, SEEDS, hosts, mean_ms, requests, simulate
from benchmarks.simulation.figure import Figure, Line, Order, bars, chart

_GPUS, _INSTANCES, _CAPACITY, _SLO_S = 4, 8, 7_500.0, 1.25  # of an instance of 72B, in the paper's cluster A
_SPEEDS_GBIT = (2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 150.0, 220.0, 300.0, 400.0, 576.0, 1000.0)  # a GPU


def scaled(gbit: float, seconds: float) -> Outcome:
    """Simulate 72B whose weights come into each GPU at so many Gbit/s, wherever from.

    The conversations, at half of what half of the cluster can prefill; the load is what arrives.
    """
    profile = PROFILES["qwen2.5-72b@a800x4"]
    profile = replace(profile, stages=replace(profile.stages, load_bytes_per_s=_GPUS * gbit * GBIT))
    model = Model(
        "m", profile, "", _SLO_S, 0.2, min=1, tokens_per_s=_CAPACITY, concurrency=400, disaggregated=True,
        batch_tokens=4096,
    )  # fmt: skip
    case = CASES["azure-conv"]
    machine = replace(hosts(case), count=4, devices=_INSTANCES // 4)
    found = window(azure("azure-conv"), 0.0, min(case.seconds, seconds))
    tokens = mean([request.prompt_tokens for request in found])
    asked = scale(found, 0.25 * _INSTANCES * _CAPACITY / tokens, 1)
    strategy = with_bounds(strategy_named("allcache"), BOUNDS)
    strategy = replace(strategy, policy=replace(strategy.policy, ends_starts=False))
    return Simulation(Fleet("speed", (machine,), (model,)), strategy, asked, tick_s=0.1).run()


def _in_time(outcome: Outcome, slo_s: float) -> float:
    return outcome.attainment(lambda _: slo_s)


def figure_3(seconds: float) -> Figure:
    late = {gbit: 100 * (1 - _in_time(scaled(gbit, seconds), _SLO_S)) for gbit in _SPEEDS_GBIT}
    found = [Line(f"{gbit:g} Gbit/s a GPU: later than 1.25 s", value, None, "%") for gbit, value in late.items()]
    for most, published in ((60.0, 220.0), (1.0, 576.0)):
        enough = next((gbit for gbit, value in late.items() if value <= most), math.inf)
        found.append(Line(f"the slowest with at most {most:g} % late", enough, published, "Gbit/s"))
    shown = {f"{gbit:g} Gbit/s": late[gbit] for gbit in (576.0, 100.0, 10.0)}
    return Figure(
        "blitzscale-3",
        "BlitzScale Figure 3: first tokens of 72B that are late, by the speed of scaling",
        chart({"72B": [(math.log10(gbit), value) for gbit, value in late.items()]}, "log10 of Gbit/s a GPU", "late, %"),
        found,
        "The paper has BurstGPT, whose load grows five times within two seconds; the conversations' grows more slowly, "
        "so slower scaling suffices to have 60 % late. That (nearly) all are in time needs the same speed: a start has "
        "to take 0.5 s, since a first token takes 0.7 s without one. The load is what arrives.",
        [Order("late, order", shown)],
    )


def figure_pairs(seconds: float) -> Figure:
    found, shown = [], {}
    for trace, case in CASES.items():
        for name, system, every in (
            ("no pairs", "s-llm+multicast", False),
            ("pairs where needed", "blitzscale", False),
            ("pairs always", "blitzscale", True),
        ):
            runs = [
                simulate(system, trace, requests(trace, seconds, seed), seconds, waiting=False, every=every)
                for seed in SEEDS
            ]
            late = 100 * (1 - mean([_in_time(outcome, case.slo_s) for outcome in runs]))
            shown[f"{trace}, {name}"] = late
            found += [
                Line(f"{trace}, {name}: pairs", mean([float(outcome.relieved) for outcome in runs]), None, ""),
                Line(f"{trace}, {name}: starts", mean([float(outcome.cold_starts) for outcome in runs]), None, ""),
                Line(f"{trace}, {name}: mean TTFT", mean_ms(runs), None, "ms"),
                Line(f"{trace}, {name}: first tokens later than the SLO", late, None, "%"),
            ]
    return Figure(
        "blitzscale-pairs",
        "BlitzScale §5.2: live scaling for each start, and for those for which the SLO needs it",
        bars(shown, "% later than the SLO"),
        found,
        "The load is what arrives. Means of three runs. A start is paired if the first tokens of what waits would be "
        "late, or of what comes at the present rate while its weights arrive. Arrivals that grow afterwards are not "
        "foreseen, and what a pair costs both instances is not simulated, so pairs for all starts look best. Under the "
        "code trace's bursts, which are more than the cluster can prefill, nearly all are needed.",
    )
